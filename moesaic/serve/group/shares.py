"""Which part of each parameter a rank of a worker group holds. Every matrix is divided by its output rows.

So no sum is ever divided: an output element is computed on one rank from all its inputs, in the order one process adds
them. Heads divide queries, keys and values (key/value heads are copied where ranks are more), hidden units divide gate
and up, rows of D divide what reads them, tokens divide embedding and head. With `ep` whole experts lie on ranks; with
`tp` alone each expert is divided like a dense network. Norms, routers, the down-projections of latent attention and its
indexer are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from moesaic.errors import UserError
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.config import Experts, GroupedQuery, ModelConfig
from moesaic.model.transformer import Model
from moesaic.model.whole_only import refuse_dividing
from moesaic.parallel.layout import ParallelLayout, nearest_divisor
from moesaic.parallel.parts import Part
from moesaic.parallel.tensor.partition import kv_heads_of, part_of
from moesaic.serve.core.sequence_states import refuse_request

BY_ROWS = frozenset({"out", "down", "join"})  # outputs are rows of D, or of the stream
EXPERTS = frozenset({"gate_up_EGD", "down_EDF"})


def spans(total: int, ranks: int) -> list[tuple[int, int]]:
    """`total` things in a row divided among ranks: at most one more for some than for others."""
    return list(pairwise(total * rank // ranks for rank in range(ranks + 1)))


def widths(total: int, ranks: int) -> list[int]:
    return [stop - start for start, stop in spans(total, ranks)]


class Share:
    """What the rank at (`dp`, `tp`) holds of a model."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, rank: int) -> None:
        self.config, self.layout, self.rank = config, layout, rank
        self.tp_rank, self.ep_rank = rank % layout.tp, rank % layout.ep

    def part(self, name: str, shape: Sequence[int]) -> Part | None:
        """Of the parameter of that name and whole shape; None: all of it."""
        tp, rank = self.layout.tp, self.tp_rank
        owner, _, leaf = name.rpartition(".")
        site = owner.rpartition(".")[2]
        if leaf in EXPERTS:
            if self.layout.ep > 1:
                return Part(0, (spans(shape[0], self.layout.ep)[self.ep_rank],))
            return (
                None
                if tp == 1
                else _halves(1, shape[1], rank, tp)
                if leaf == "gate_up_EGD"
                else _rows(1, shape[1], rank, tp)
            )
        if tp == 1:
            return None
        if name in ("embed", "head") or (site in BY_ROWS and leaf in ("weight", "bias")):
            return _rows(0, shape[0], rank, tp)
        if site == "gate_up":
            return _halves(0, shape[0], rank, tp)
        return part_of(name, shape, self.config, rank, tp)

    def experts(self, count: int) -> range:
        """The experts of a layer that lie here."""
        return range(*spans(count, self.layout.ep)[self.ep_rank])


def _rows(dim: int, size: int, rank: int, ranks: int) -> Part:
    return Part(dim, (spans(size, ranks)[rank],))


def _halves(dim: int, size: int, rank: int, ranks: int) -> Part:
    """The same hidden units of gate and of up."""
    start, stop = spans(size // 2, ranks)[rank]
    return Part(dim, ((start, stop), (size // 2 + start, size // 2 + stop)))


def localize(model: Model, layout: ParallelLayout) -> None:
    """Tell attention how many heads it has here."""
    attention = model.config.attention
    if not isinstance(attention, GroupedQuery):
        return
    for module in model.modules():
        if isinstance(module, GroupedQueryAttention):
            module.heads, module.kv_heads = attention.heads // layout.tp, kv_heads_of(attention, layout.tp)


def check(config: ModelConfig, layout: ParallelLayout, place: str = "--layout") -> None:
    """Refuse in words what cannot be divided so, and name the nearest that can."""
    attention, tp, ep = config.attention, layout.tp, layout.ep
    if tp > 1 or ep > 1:
        refuse_dividing(config, place, "Leave tp and ep out.")
    refuse_request(config, place, "it would have to be on the rank that has the sequence's pages")
    if attention.heads % tp:
        nearest = nearest_divisor(tp, attention.heads)
        problem = f"does not divide the model's {attention.heads} attention heads"
        raise UserError(f"{place}: tp={tp}", problem, f"Nearest that works: tp={nearest}.")
    if isinstance(attention, GroupedQuery) and attention.kv_heads % tp and tp % attention.kv_heads:
        nearest = nearest_divisor(tp, attention.kv_heads)
        problem = f"{attention.kv_heads} key/value heads neither divide among {tp} ranks nor do ranks among them"
        raise UserError(f"{place}: tp={tp}", problem, f"Nearest that works: tp={nearest}.")
    counts = {layer.ffn.count for layer in (*config.layers, *config.mtp) if isinstance(layer.ffn, Experts)}
    if ep > 1 and not counts:
        raise UserError(f"{place}: ep={ep}", "the model has no experts", "Leave ep out.")
    for count in counts:
        if count % ep:
            problem = f"does not divide a layer's {count} experts"
            raise UserError(f"{place}: ep={ep}", problem, f"Nearest that works: ep={nearest_divisor(ep, count)}.")
