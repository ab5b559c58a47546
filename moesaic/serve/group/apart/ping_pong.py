"""Two micro-batches ping-pong: while the experts have one, attention works on the other.

A step's rows are cut in two at about the middle, between two sequences or within one: the second half of a sequence
attends to keys that the first has written in the same layer just before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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


class Piece(NamedTuple):
    """Rows of a batch: of these sequences, each from one of its new rows to another."""

    start: int
    stop: int
    runs: tuple[tuple[int, int, int], ...]  # sequence, first and last + 1 of its new rows


def pieces(layout: Layout, count: int = 2, within: bool = True) -> list[Piece]:
    """A batch in as many pieces of about as many rows, or fewer where there are fewer rows. `within`: also in the
    middle of a sequence, but not of a tree of draft tokens, whose rows see each other in no order."""
    cuts = [0]
    for number in range(1, count):
        wanted = layout.tokens * number // count
        span = next((span for span in layout.spans if span.start <= wanted < span.stop), None)
        whole = not within or (span is not None and layout.trees is not None and layout.trees[span.number] is not None)
        if span is not None and whole:
            wanted = span.start if wanted - span.start <= span.stop - wanted else span.stop
        cuts.append(max(wanted, cuts[-1]))
    cuts.append(layout.tokens)
    found = []
    for start, stop in pairwise(cuts):
        if start < stop:
            runs = tuple(
                (span.number, max(start, span.start) - span.start, min(stop, span.stop) - span.start)
                for span in layout.spans
                if max(start, span.start) < min(stop, span.stop)
            )
            found.append(Piece(start, stop, runs))
    return found


def piece_layout(layout: Layout, piece: Piece) -> Layout:
    """What a piece's rows are by themselves; what came before them in the same step is cached by then."""
    spans = layout.spans
    positions = layout._positions
    return Layout(
        [last - first for _, first, last in piece.runs],
        cached=[spans[number].cached + first for number, first, _ in piece.runs] if layout.cache is not None else None,
        positions=None if positions is None else positions[piece.start : piece.stop],
        cache=layout.cache,
        pages=None if layout.pages is None else [layout.pages[number] for number, _, _ in piece.runs],
        trees=None if layout.trees is None else [layout.trees[number] for number, _, _ in piece.runs],
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
    ops_of: Callable[[int, Piece], Kernels],
    cut: Sequence[Piece],
    watch: Watch | None = None,
) -> Tensor:
    """All layers. `x_TD` and `context` are of the whole batch as `model.begin` made them; `ops_of` has the kernels of
    each micro-batch, by its number."""
    contexts = []
    for number, piece in enumerate(cut):
        layout = piece_layout(context.layout, piece)
        rows_T = torch.arange(piece.start, piece.stop, device=x_TD.device)
        ops = for_batch(ops_of(number, piece), layout)
        contexts.append(ForwardContext(layout, ops, context.rope.at(rows_T), Routing(), context.absorb))
    streams = [x_TD[piece.start : piece.stop] for piece in cut]
    away: list[_Under | None] = [None] * len(cut)

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
    for micro in range(len(cut)):
        if before is not None:
            arrive(micro, before)
    if context.routing is not None:
        for layer in contexts[0].routing.choices if cut and contexts[0].routing else ():
            found = [own.routing.choices[layer] for own in contexts if own.routing is not None]
            context.routing.choices[layer] = torch.cat(found)
    return torch.cat(streams) if streams else x_TD
