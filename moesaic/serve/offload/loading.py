"""Load a model for serving: all of it, or with its experts or its layers left where they are.

    model = load_served("out/model", offload="experts", expert_cache_bytes=2 << 30)
    engine = Engine(model)

On a CPU what is left stays on disk; for a GPU it is read into pinned host memory, if it is not to stay on disk too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels, Mode
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model.block import Block
from moesaic.model.config import ModelConfig
from moesaic.model.directory import fill, load
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.families import Place
from moesaic.model.formats.checkpoint import Source
from moesaic.model.formats.opening import is_compressed
from moesaic.model.transformer import Model
from moesaic.serve.offload.expert_store import DiskExperts, ExpertStore, HostExperts
from moesaic.serve.offload.experts import OffloadCounts, OffloadedExperts, OffloadedLayer, Slots
from moesaic.serve.offload.layer_store import DiskLayers, HostLayers, LayerStore, SpilledLayers, StagedLayers, bytes_of
from moesaic.serve.offload.slot_budget import ExpertShape, divide
from moesaic.serve.offload.transfers import transfers_for
from moesaic.serve.offload.weights import StreamedLayers, leaves_of, tensors_of

Offload = Literal["experts", "weights"]
Home = Literal["disk", "host"]
OFFLOADS, HOMES = ("experts", "weights"), ("disk", "host")
SHARE = 0.25  # of the experts' bytes that are cached where nothing is said
EXPERT_PARAMETERS = ("gate_up_EGD", "down_EDF")


def load_served(
    path: str | Path,
    *,
    offload: Offload | None = None,
    offload_from: Home | None = None,
    expert_cache_bytes: int | None = None,
    **options: Any,
) -> Model:
    """`options` are those of `moesaic.load`."""
    if offload is None:
        given = {"--expert-cache-gb": expert_cache_bytes, "--offload-from": offload_from}
        for flag, useless in given.items():
            if useless is not None:
                raise UserError(flag, "is for offloaded weights", "Add --offload experts, or leave it out.")
        return load(path, **options)
    for name, value, known in (("--offload", offload, OFFLOADS), ("--offload-from", offload_from, (None, *HOMES))):
        if value not in known:
            raise UserError(name, f'there is no "{value}"', f"Take {' or '.join(filter(None, known))}.")
    if offload == "weights":
        if expert_cache_bytes is not None:
            raise UserError("--expert-cache-gb", "is for --offload experts", "Leave it out.")
        return load(path, **options, filler=partial(fill_streamed, home=offload_from))
    return load(path, **options, filler=partial(fill_with_experts, home=offload_from, cache_bytes=expert_cache_bytes))


# Experts


def mixtures(model: Model) -> dict[str, Block]:
    """The layers with experts, those that predict further tokens last, by the sites of the experts."""
    blocks = [*model.layers, *(layer.block for layer in model.mtp)]
    return {block.ffn.site: block for block in blocks if isinstance(block.ffn, MixtureFeedForward)}


def fill_with_experts(
    config: ModelConfig,
    source: Source,
    places: list[Place],
    dtype: torch.dtype,
    device: torch.device,
    mode: Mode,
    *,
    home: Home | None,
    cache_bytes: int | None,
) -> Model:
    """What `moesaic.model.directory.fill` does, with the experts left out."""
    of_experts = {place.parameter for place in places if place.parameter.endswith(EXPERT_PARAMETERS)}
    if not of_experts:
        raise UserError(source.place, "has no experts to offload", "Take --offload weights.")
    if is_compressed(source):
        raise UserError(source.place, "quantized experts cannot be offloaded yet", "Take --offload weights.")
    model = fill(config, source, places, dtype, device, mode, of_experts.__contains__)
    by_parameter = _by_parameter(places)
    parts = [(by_parameter[f"{site}.gate_up_EGD"], by_parameter[f"{site}.down_EDF"]) for site in mixtures(model)]
    store: ExpertStore = DiskExperts(source, parts)
    if (home or default_home(model.device)) == "host":
        in_memory = HostExperts(pinned=model.device.type == "cuda")
        for block in mixtures(model).values():
            in_memory.fill_layer(store, *_plain_specs(block, model.dtype))
        store = in_memory
    offload_experts(model, store, cache_bytes)
    return model


def default_home(device: torch.device) -> Home:
    return "host" if device.type == "cuda" else "disk"


def _by_parameter(places: Sequence[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if not place.copy:
            found[place.parameter].append(place)
    return found


Specs = list[tuple[tuple[int, ...], torch.dtype]]


def _plain_specs(block: Block, dtype: torch.dtype) -> tuple[int, Specs]:
    """How many experts a layer has, and the tensors of each."""
    ffn = cast(MixtureFeedForward, block.ffn)
    matrices = (ffn.gate_up_EGD, ffn.down_EDF)
    return len(ffn.gate_up_EGD), [(tuple(matrix.shape[1:]), dtype) for matrix in matrices]


def offload_experts(
    model: Model, store: ExpertStore, cache_bytes: int | None = None, *, fixed: int = 0, fill_slots: bool = True
) -> OffloadedExperts:
    """Let a model whose experts have shapes only find them in a store. The first `fixed` experts of each layer stay in
    the cache for good; whoever says so, or not to fill the slots, fills them himself."""
    device, dtype, blocks = model.device, model.dtype, mixtures(model)
    specs = [_plain_specs(block, dtype) for block in blocks.values()]
    shapes = [
        ExpertShape(count, sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in of_expert),
                    cast(MixtureFeedForward, block.ffn).router.shape.per_token, tuple(of_expert))
        for block, (count, of_expert) in zip(blocks.values(), specs, strict=True)
    ]  # fmt: skip
    if cache_bytes is None:
        cache_bytes = int(SHARE * sum(shape.count * shape.bytes for shape in shapes))
    transfers, counts = transfers_for(device), OffloadCounts()
    layers: dict[int, OffloadedLayer] = {}
    sites = list(blocks)
    for pool in divide(cache_bytes, shapes):
        of_expert = specs[pool.layers[0]][1]
        tensors = [torch.empty((pool.slots, *shape), dtype=kind, device=device) for shape, kind in of_expert]
        slots = Slots(tensors, store, transfers, counts)
        slots.shared = len(pool.layers) > 1
        for number in pool.layers:
            block = blocks[sites[number]]
            ffn = cast(MixtureFeedForward, block.ffn)
            make = partial(_plain_weights, activation=ffn.activation, site=sites[number])
            layers[number] = OffloadedLayer(number, specs[number][0], slots, make, block.ffn_norm, ffn.router)
        if not slots.shared and fill_slots:
            first_experts(slots, pool.layers[0], fixed)
    for number in range(1, len(sites)):
        if sites[number].startswith("layers."):  # further predictions begin from other hidden states
            layers[number - 1].following = layers[number]
    made = OffloadedExperts(model.ops, {site: layers[number] for number, site in enumerate(sites)}, counts)
    model.ops = cast(Kernels, made)
    return made


def _plain_weights(tensors: Sequence[Tensor], activation: str, site: str) -> ExpertWeights:
    return ExpertWeights(tensors[0], tensors[1], activation, site)


def first_experts(slots: Slots, layer: int, fixed: int = 0) -> None:
    """A cache begins with the first experts of its layer: with all of them, if it holds all."""
    for expert in range(slots.cache.slots):
        if expert >= fixed:
            slots.fetch((layer, expert))
        else:
            slots.cache.pin(slots.cache.place((layer, expert)))  # type: ignore[arg-type]
    slots.wait([(layer, expert) for expert in range(fixed, slots.cache.slots)])


# Layers


def fill_streamed(
    config: ModelConfig,
    source: Source,
    places: list[Place],
    dtype: torch.dtype,
    device: torch.device,
    mode: Mode,
    *,
    home: Home | None,
) -> Model:
    """The same, with the layers left out."""
    model = fill(config, source, places, dtype, device, mode, lambda name: name.startswith("layers."))
    home = home or default_home(device)
    blocks = cast("list[Block]", list(model.layers))
    by_parameter = _by_parameter(places)
    store: LayerStore
    if is_compressed(source) or home == "host":
        store = HostLayers(device.type == "cuda") if home == "host" else SpilledLayers()
        for number in range(len(blocks)):
            # Read as always, a layer at a time, and put away in the form in which it computes.
            made = fill(config, source, places, dtype, device, mode, _other_than(f"layers.{number}."))
            blocks[number] = model.layers[number] = cast(Block, made.layers[number])
            tensors = tensors_of(blocks[number])
            if isinstance(store, HostLayers):
                for view, tensor in zip(store.add(number, tensors), tensors, strict=True):
                    view.copy_(tensor)
            else:
                store.add(number, tensors)
            for leaf in leaves_of(blocks[number]):
                leaf.assign(torch.empty_like(leaf.tensor, device="meta"))
    else:
        for block in blocks:
            for leaf in leaves_of(block):
                if not leaf.name.endswith("correction"):
                    leaf.assign(torch.empty_like(leaf.tensor, dtype=dtype))
        names = [[name for name, _ in _named(block, f"layers.{number}.")] for number, block in enumerate(blocks)]
        shapes = {number: tensors_of(block) for number, block in enumerate(blocks)}
        store = DiskLayers(source, shapes, {n: [by_parameter[name] for name in names[n]] for n in shapes})
    if device.type == "cuda" and home == "disk":
        store = StagedLayers(store, max(bytes_of(tensors_of(block)) for block in blocks))
    stream_layers(model, store)
    return model


def _other_than(prefix: str) -> Callable[[str], bool]:
    return lambda name: not name.startswith(prefix)


def _named(block: Block, prefix: str) -> list[tuple[str, Tensor]]:
    """Every tensor of a block by the name its parameter has in the model, in the order of `leaves_of`."""
    paths = {id(module): path for path, module in block.named_modules()}
    return [(f"{prefix}{paths[id(leaf.module)]}.{leaf.name}", leaf.tensor) for leaf in leaves_of(block)]


def stream_layers(model: Model, store: LayerStore) -> StreamedLayers:
    """Let a model whose layers have shapes only find them in a store."""
    return StreamedLayers(list(model.layers), store, model.device, transfers_for(model.device))
