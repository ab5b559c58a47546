"""A small trained model with zeros around its weights: it says what it said, and costs what a larger one costs.

Training a model of tens of millions of parameters until its answers repeat takes a CPU hours, and random weights repeat
nothing. Here every matrix of the small model is a corner of a larger one, norms are rescaled for the wider rows, and
layers are added that are computed in full and contribute nothing. Timings of passes are those of the larger shape.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moesaic.model.config import Dense, Experts, Layer
from moesaic.model.transformer import Model

GATED = ("gate_up.weight", "gate_up_EGD")  # two matrices, one above the other
SILENT = ("attention.out.weight", "down.weight", "down_EDF")  # what an added layer would say


def widened(model: Model, hidden: int, expert_hidden: int, layers: int) -> Model:
    config = model.config

    def larger(ffn: Dense | Experts) -> Dense | Experts:
        if isinstance(ffn, Dense):
            return replace(ffn, hidden=2 * expert_hidden)
        return replace(ffn, hidden=expert_hidden, shared_hidden=expert_hidden if ffn.shared_hidden else 0)

    shape = [Layer(larger(layer.ffn)) for layer in config.layers]
    narrow = config.hidden / hidden
    wide = Model(
        replace(
            config,
            hidden=hidden,
            layers=tuple(shape + shape[-1:] * (layers - len(shape))),
            norm_eps=config.norm_eps * narrow,  # of a mean over more dimensions, the added ones being zero
        )
    )
    wide.tokenizer = model.tokenizer
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, weight in (*wide.named_parameters(), *wide.named_buffers()):
            if name in own:
                scale = narrow**0.5 if own[name].shape == (config.hidden,) else 1.0
                cornered(weight, own[name] * scale, name.endswith(GATED))
            elif name.endswith(SILENT):
                weight.zero_()
            elif weight.dim() > 1:
                weight.normal_(std=0.02)
            else:
                weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return wide


def cornered(weight: Tensor, own: Tensor, gated: bool) -> None:
    """Zeros, with a smaller matrix in their first corner, or two of them at the beginning of each half."""
    weight.zero_()
    parts = own.chunk(2, dim=-2) if gated else [own]
    for part, place in zip(parts, weight.chunk(2, dim=-2) if gated else [weight], strict=True):
        place[tuple(slice(size) for size in part.shape)] = part
