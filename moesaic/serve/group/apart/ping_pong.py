"""Two micro-batches ping-pong: while the experts have one, attention works on the other.

A step's rows are cut in two at about the middle, between two sequences or within one: the second half of a sequence
attends to keys that the first has written in the same layer just before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels
from moesaic.kernels.wrapped import for_batch
from moesaic.model.block import Block
from moesaic.model.config import GroupedQuery
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.experts import BegunMixture, MixtureFeedForward
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.group.apart.expert_rank import Watch

MICRO_BATCHES = 2


class Cut(NamedTuple):
    """Rows of a batch: of these sequences, each from one of its new rows to another."""

    start: int
    stop: int
    runs: tuple[tuple[int, int, int], ...]  # sequence, first and last + 1 of its new rows

    @property
    def rows(self) -> int:
        return self.stop - self.start


def cuts(lengths: Sequence[int], whole: Sequence[bool], count: int = MICRO_BATCHES) -> list[Cut]:
    """Sequences with so many new rows in pieces of about as many, or fewer pieces where there are fewer rows. A `whole`
    sequence is not cut in two: the rows of a tree of draft tokens see each other in no order."""
    starts = [0, *accumulate(lengths)]
    edges = [0]
    for number in range(1, count):
        wanted = starts[-1] * number // count
        for start, stop, alone in zip(starts, starts[1:], whole, strict=False):
            if alone and start < wanted < stop:
                wanted = start if wanted - start <= stop - wanted else stop
        edges.append(max(wanted, edges[-1]))
    edges.append(starts[-1])
    found = []
    for start, stop in pairwise(edges):
        if start < stop:
            runs = tuple(
                (number, max(start, first) - first, min(stop, last) - first)
                for number, (first, last) in enumerate(pairwise(starts))
                if max(start, first) < min(stop, last)
            )
            found.append(Cut(start, stop, runs))
    return found


def cut_layout(layout: Layout, cut: Cut) -> Layout:
    """What a micro-batch's rows are by themselves; what came before them in the same step is cached by then."""
    spans = layout.spans
    positions = layout._positions
    return Layout(
        [last - first for _, first, last in cut.runs],
        cached=[spans[number].cached + first for number, first, _ in cut.runs] if layout.cache is not None else None,
        positions=None if positions is None else positions[cut.start : cut.stop],
        cache=layout.cache,
        pages=None if layout.pages is None else [layout.pages[number] for number, _, _ in cut.runs],
        trees=None if layout.trees is None else [layout.trees[number] for number, _, _ in cut.runs],
        device=layout.device,
    )


def cuts_sequences(model: Model) -> bool:
    """Whether a sequence's rows have the same bits in two pieces: not where latent attention chooses the shorter of two
    ways by how many there are."""
    return model.mode == "invariant" or isinstance(model.config.attention, GroupedQuery)


class _Under(NamedTuple):
    """A micro-batch whose rows are with the experts."""

    x_TD: Tensor
    begun: BegunMixture


def run(
    model: Model,
    x_TD: Tensor,
    context: ForwardContext,
    ops_of: Callable[[int, Layout], Kernels],
    parts: Sequence[Cut],
    watch: Watch | None = None,
) -> Tensor:
    """All layers. `x_TD` and `context` are of the whole batch as `model.begin` made them; `ops_of` has the kernels of
    each micro-batch, by its number."""
    contexts = []
    for number, cut in enumerate(parts):
        layout = cut_layout(context.layout, cut)
        rows_T = torch.arange(cut.start, cut.stop, device=x_TD.device)
        ops = for_batch(ops_of(number, layout), layout)
        contexts.append(ForwardContext(layout, ops, context.rope.at(rows_T), Routing(), context.absorb))
    streams = [x_TD[cut.start : cut.stop] for cut in parts]
    away: list[_Under | None] = [None] * len(parts)

    def arrive(micro: int, block: Block) -> None:
        under = away[micro]
        if under is not None:
            ffn = cast(MixtureFeedForward, block.ffn)
            streams[micro] = block.add(under.x_TD, ffn.finish(under.begun, contexts[micro]), contexts[micro])
            away[micro] = None

    before: Block | None = None
    for layer, block in enumerate(cast("list[Block]", list(model.layers))):
        for micro, own in enumerate(contexts):
            if before is not None:
                arrive(micro, before)
            if watch is not None:
                watch("attention", layer, micro, False)
            x = block.attend(streams[micro], own)
            normed = block.ffn_norm(x, own.ops)
            if isinstance(block.ffn, MixtureFeedForward):
                away[micro] = _Under(x, block.ffn.begin(normed, own))
            else:
                streams[micro] = block.add(x, block.ffn(normed, own), own)
            if watch is not None:
                watch("attention", layer, micro, True)
        before = block
    for micro in range(len(parts)):
        if before is not None:
            arrive(micro, before)
    if context.routing is not None:
        for layer, block in enumerate(cast("list[Block]", list(model.layers))):
            if isinstance(block.ffn, MixtureFeedForward):
                none_TK = torch.empty(0, block.ffn.router.shape.per_token, dtype=torch.int64, device=x_TD.device)
                found = [own.routing.choices[layer] for own in contexts if own.routing is not None]
                context.routing.choices[layer] = torch.cat(found) if found else none_TK
    return torch.cat(streams) if streams else x_TD
