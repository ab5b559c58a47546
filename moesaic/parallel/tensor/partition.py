"""Which part of each parameter a tensor-parallel rank holds (`parallel/parts.py` says how it is taken and put back).

Heads and hidden units are divided: rows of the matrices that make them (and of their biases), columns of those that
read them. What works on single tokens (embedding, head, norms, routers, the down-projections of latent attention,
biases behind a sum) is whole on every rank, and so are experts, which are divided by other means.

Where there are fewer key/value heads than ranks, ranks hold copies: each serves other query heads, so a copy's own
gradient is a part of the sum, and the kernels add the copies' up in the backward pass (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from moesaic.errors import UserError
from moesaic.model.config import Experts, GroupedQuery, Latent, ModelConfig
from moesaic.model.transformer import Model
from moesaic.parallel.parts import Part

# By the last name of a call site: whether it makes what is divided (its rows are divided) or reads it (its columns).
MAKES = frozenset({"qkv", "q_up", "kv_up", "gate_up"})
READS = frozenset({"out", "down"})


def part_of(name: str, shape: Sequence[int], config: ModelConfig, rank: int, ranks: int) -> Part | None:
    """Of the parameter called `name`, whose whole has this shape; None where every rank holds all of it."""
    *_, site, kind = ("", *name.split("."))
    if ranks == 1 or kind not in ("weight", "bias"):
        return None
    if site in READS:
        return _even(1, shape[1], 1, rank, ranks) if kind == "weight" else None
    if site not in MAKES:
        return None
    if site == "gate_up":
        return _even(0, shape[0], 2, rank, ranks)
    if isinstance(config.attention, Latent):
        return _even(0, shape[0], 1, rank, ranks)
    return _query_key_value(config.attention, rank, ranks)


def kv_heads_of(attention: GroupedQuery, ranks: int) -> int:
    """How many key/value heads a rank has."""
    return max(1, attention.kv_heads // ranks)


def kv_copies(attention: GroupedQuery, ranks: int) -> int:
    """How many ranks, one after the other, hold the same key/value heads."""
    return max(1, ranks // attention.kv_heads)


def _even(dim: int, size: int, runs: int, rank: int, ranks: int) -> Part:
    """The same share of each of `runs` equal parts, as gate and up are."""
    run = size // runs
    assert run % ranks == 0, "check() refuses what does not divide"
    share = run // ranks
    starts = [number * run + rank * share for number in range(runs)]
    return Part(dim, tuple((start, start + share) for start in starts), (1,) * runs)


def _query_key_value(attention: GroupedQuery, rank: int, ranks: int) -> Part:
    size, copies, own = attention.head_size, kv_copies(attention, ranks), kv_heads_of(attention, ranks)
    heads = attention.heads // ranks
    first = rank // copies * own
    begin_k, begin_v = attention.heads, attention.heads + attention.kv_heads
    runs = ((rank * heads, heads), (begin_k + first, own), (begin_v + first, own))
    return Part(0, tuple((at * size, (at + count) * size) for at, count in runs), (1, copies, copies), rank % copies)


@torch.no_grad()
def shard_model(model: Model, rank: int, ranks: int) -> dict[str, Part | None]:
    """Replace a whole model's parameters by this rank's parts of them, in place; what became of each."""
    check(model.config, ranks)
    parts = {}
    for name, parameter in list(model.named_parameters()):
        parts[name] = part = part_of(name, parameter.shape, model.config, rank, ranks)
        if part is not None:
            owner, _, last = name.rpartition(".")
            own = nn.Parameter(part.take(parameter.detach()), parameter.requires_grad)
            setattr(model.get_submodule(owner), last, own)
    return parts


def check(config: ModelConfig, ranks: int, place: str = "parallel.tp") -> None:
    """Refuse in words what `ranks` cannot divide, and name the nearest number that can."""
    wrong = next(_indivisible(config, ranks), None)
    if wrong is None:
        return
    most = max(config.attention.heads, 1)
    fitting = [size for size in range(1, most + 1) if next(_indivisible(config, size), None) is None]
    nearest = min(fitting, key=lambda size: (abs(size - ranks), size))
    raise UserError(f"{place}={ranks}", wrong, f"Nearest that works: {place}={nearest}.")


def _indivisible(config: ModelConfig, ranks: int) -> Iterator[str]:
    attention = config.attention
    if attention.heads % ranks:
        yield f"{ranks} ranks do not divide {attention.heads} attention heads"
    if isinstance(attention, GroupedQuery) and attention.kv_heads % ranks and ranks % attention.kv_heads:
        yield f"{attention.kv_heads} key/value heads neither divide among {ranks} ranks nor do ranks among them"
    for number, layer in enumerate((*config.layers, *config.mtp)):
        ffn = layer.ffn
        size = ffn.shared_hidden if isinstance(ffn, Experts) else ffn.hidden
        if size % ranks:
            kind = "shared expert's" if isinstance(ffn, Experts) else "feed-forward"
            yield f"{ranks} ranks do not divide the {kind} hidden size of layer {number}, {size}"
