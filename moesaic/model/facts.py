"""What a model amounts to: parameters, bytes, and what running or training it takes. Without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from moesaic.model.config import Experts, Layer, ModelConfig, Reading
from moesaic.model.families import Place, family_for
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.transformer import Model


@dataclass(frozen=True)
class Facts:
    parameters: int
    active_parameters: int  # that one token passes through
    prediction_parameters: int  # of these, in multi-token-prediction layers
    run_bytes: int  # weights, in the stored format
    train_bytes: int  # weights, gradients and AdamW's two moments, in float32; activations come on top
    kv_bytes_per_token: int
    state_bytes: int  # of a sequence, beside that


def facts(config: ModelConfig) -> Facts:
    with torch.device("meta"):
        model = Model(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    further = sum(parameter.numel() for parameter in model.mtp.parameters())
    idle = 0
    for layer in config.layers:
        if isinstance(layer.ffn, Experts):
            biases = 2 * layer.ffn.hidden + config.hidden if layer.ffn.bias else 0
            idle += (layer.ffn.count - layer.ffn.per_token) * (3 * layer.ffn.hidden * config.hidden + biases)
    # A token reads one row of the embedding, not the whole table, unless the table is the output matrix too.
    unread = 0 if config.tied else (config.vocab - 1) * config.hidden
    if config.encoder is not None:
        unread += max(config.encoder.positions - 1, 0) * config.hidden
    size = getattr(torch, config.dtype).itemsize
    kept = [] if config.encoder else model.cache_shapes()[: len(config.layers)]
    return Facts(
        parameters=total,
        active_parameters=total - further - idle - unread,
        prediction_parameters=further,
        run_bytes=total * size,
        train_bytes=total * 16,
        kv_bytes_per_token=0
        if config.encoder
        else size * sum(prod(shape) for layer in kept for shape in layer.values()),
        state_bytes=0 if config.encoder else model.state_bytes,
    )


def bits_per_weight(stored: Checkpoint, config: ModelConfig) -> float:
    """On disk; what is written a second time for other programs, such as the embedding beside layers that predict
    further tokens, is no weight of its own."""
    places: list[Place] = family_for(config.family, stored.place).layouts(config)[0]
    copies = tuple(place.name.removesuffix("weight") for place in places if place.copy)
    shapes = stored.shapes()
    again = [name for name in shapes if name.startswith(copies)]
    twice = sum(prod(shapes[name]) * stored.dtype(name).itemsize for name in again)
    return round((stored.bytes - twice) * 8 / facts(config).parameters, 3)


def describe_layers(config: ModelConfig) -> list[str]:
    """The layers in words, runs of equal ones together."""
    runs: list[tuple[Layer, int]] = []
    for layer in config.layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    lines = []
    for layer, count in runs:
        ffn = layer.ffn
        if isinstance(ffn, Experts):
            text = f"{ffn.per_token} of {ffn.count} experts of {ffn.hidden}"
            text += f", shared {ffn.shared_hidden}" if ffn.shared_hidden else ""
            text += ", residual" if ffn.residual else ""
            text += f", {ffn.score} router"
        elif isinstance(ffn, Reading):
            text = f"reading of the knowledge base, keys of {ffn.hidden}"
        else:
            text = f"dense {ffn.hidden}"
        if layer.delta is not None:
            state = f"{layer.delta.heads} states of {layer.delta.key_size} x {layer.delta.value_size}"
            text = f"gated delta rule ({state}), {text}"
        text += f", window {layer.window}" if layer.window else ""
        text += f", {layer.index} indexer" if layer.index else ""
        lines.append(f"{count} x {text}")
    return lines
