"""Matmuls with the collective that belongs to them, both cut into tiles (Flux), forward and backward by hand.

Gather, then multiply: a rank's own rows are multiplied while the first tile of the others' travels, and each tile while
the next does. Multiply, then scatter: the others' rows first, tile by tile, each on its way while the next is
multiplied, this rank's own last. The backward of one is the other; the weight's gradient, which needs all
rows, is computed while gradients of rows travel. With one tile collective and matmul follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.parallel.tensor.exchange import Chunks, TileExchange, summed

Product = Callable[[Tensor], Tensor]


class Division(NamedTuple):
    """How the rows of one forward are divided, and how they travel."""

    exchange: TileExchange
    chunks: Chunks
    tiles: int
    keep: bool  # gathered rows are kept for the backward pass, or gathered again there


class Copies(NamedTuple):
    """Rows of a weight, from `start` on, that `ranks` ranks in a row hold alike."""

    start: int
    ranks: int


def gather_then(
    x_ND: Tensor, product: Product, division: Division, *, keep: bool, backward: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The product of all ranks' rows, and if they are to be kept the rows."""
    exchange, chunks, tiles = division.exchange, division.chunks, division.tiles
    travelling = exchange.begin_gathers(x_ND, chunks, tiles, backward=backward)
    if tiles == 1:
        x_TD = travelling[0].whole()
        return product(x_TD), x_TD if keep else None
    mine = chunks.of(exchange.rank)
    y_NO = product(x_ND)
    y_TO = y_NO.new_empty(chunks.total, y_NO.shape[1])
    y_TO[mine] = y_NO
    kept_TD = None
    if keep:
        kept_TD = x_ND.new_empty(chunks.total, x_ND.shape[1])
        kept_TD[mine] = x_ND
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    for number, tile in enumerate(travelling):
        blocks = tile.wait()
        found = [blocks[rank] for rank in others]
        y_AO = product(torch.cat(found))
        for rank, x, y in zip(others, found, y_AO.split([len(block) for block in found]), strict=True):
            rows = chunks.tile(rank, number, tiles)
            y_TO[rows] = y
            if kept_TD is not None:
                kept_TD[rows] = x
    return y_TO, kept_TD


def then_scatter(
    x_TD: Tensor,
    product: Product,
    division: Division,
    meanwhile: Callable[[], None] | None = None,
    *,
    backward: bool = False,
) -> Tensor:
    """The sum over ranks of the products of all rows, of which each rank gets its own. `meanwhile` is done when all
    are on their way."""
    exchange, chunks, tiles = division.exchange, division.chunks, division.tiles
    if tiles == 1:
        all_at_once = exchange.begin_scatter(product(x_TD), chunks.sizes(), backward=backward)
        if meanwhile is not None:
            meanwhile()
        return all_at_once.total()
    others = [rank for rank in range(exchange.size) if rank != exchange.rank]
    travelling = []
    for number in range(tiles):
        rows_AD = torch.cat([x_TD[chunks.tile(rank, number, tiles)] for rank in others])
        sizes = chunks.sizes(number, tiles)
        travelling.append(exchange.begin_scatter_others(product(rows_AD), sizes, backward=backward))
    mine = chunks.of(exchange.rank)
    own_NO = product(x_TD[mine])
    if meanwhile is not None:
        meanwhile()
    parts_RNO = own_NO.new_empty(exchange.size, *own_NO.shape)
    parts_RNO[exchange.rank] = own_NO
    for number, tile in enumerate(travelling):
        rows, blocks = chunks.tile(exchange.rank, number, tiles), tile.wait()
        for rank in others:
            parts_RNO[rank, rows.start - mine.start : rows.stop - mine.start] = blocks[rank]
    return summed(parts_RNO)


class GatherMatmul(torch.autograd.Function):
    """x W^T + b of all ranks' rows, W and b this rank's part of the outputs. `gathered`: the rows, if somebody gathered
    them before."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        linear: Callable[..., Tensor],
        division: Division,
        copies: Copies | None,
        gathered_TD: Tensor | None,
    ) -> Tensor:
        def product(rows_AD: Tensor) -> Tensor:
            return linear(rows_AD, weight_OD, bias_O)

        keep = division.keep and weight_OD.requires_grad
        kept_TD = gathered_TD
        if gathered_TD is not None:
            y_TO = product(gathered_TD)
        else:
            y_TO, kept_TD = gather_then(x_ND, product, division, keep=keep)
        ctx.save_for_backward(kept_TD if keep else x_ND, weight_OD)
        ctx.kept, ctx.division, ctx.copies, ctx.biased = keep, division, copies, bias_O is not None
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        division: Division = ctx.division
        exchange, copies = division.exchange, ctx.copies
        rows_AD, weight_OD = ctx.saved_tensors
        d_y_TO = grads[0].to(weight_OD.dtype).contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        again = None
        if wants_weight and not ctx.kept:
            again = exchange.begin_gather(rows_AD, division.chunks, backward=True)
        d_weight_OD: Tensor | None = None
        d_bias_O: Tensor | None = None

        def of_weight() -> None:
            nonlocal d_weight_OD, d_bias_O
            if wants_weight:
                d_weight_OD = d_y_TO.t() @ (rows_AD if again is None else again.whole())
            if wants_bias:
                d_bias_O = d_y_TO.sum(0)

        d_x_ND = None
        if wants_x:
            d_x_ND = then_scatter(d_y_TO, lambda rows_AO: rows_AO @ weight_OD, division, of_weight, backward=True)
        else:
            of_weight()
        if copies is not None:
            for gradient in (d_weight_OD, d_bias_O):
                if gradient is not None:
                    shared = gradient[copies.start :]
                    shared.copy_(exchange.add_copies(shared.reshape(len(shared), -1), copies.ranks).view_as(shared))
        return d_x_ND, d_weight_OD, d_bias_O, None, None, None, None


class MatmulScatter(torch.autograd.Function):
    """The sum over ranks of x W^T, of which each rank gets its rows; W is this rank's part of the inputs."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_DI: Tensor, linear: Callable[..., Tensor], division: Division) -> Tensor:
        ctx.save_for_backward(x_TI, weight_DI)
        ctx.division = division
        return then_scatter(x_TI, lambda rows_AI: linear(rows_AI, weight_DI, None), division)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_TI, weight_DI = ctx.saved_tensors
        d_y_ND = grads[0].to(weight_DI.dtype)
        wants_weight = ctx.needs_input_grad[1]
        d_x_TI, d_y_TD = gather_then(
            d_y_ND, lambda rows_AD: rows_AD @ weight_DI, ctx.division, keep=wants_weight, backward=True
        )
        d_weight_DI = d_y_TD.t() @ x_TI if d_y_TD is not None else None
        return d_x_TI, d_weight_DI, None, None


class Gather(torch.autograd.Function):
    """All ranks' rows; on the way back each rank gets the sum of the gradients of its own, or where all found the same
    just what it found itself."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, division: Division, add: bool) -> Tensor:
        ctx.division, ctx.add = division, add
        return division.exchange.begin_gather(x_ND, division.chunks).whole()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, chunks = ctx.division.exchange, ctx.division.chunks
        if not ctx.add:
            return grads[0][chunks.of(exchange.rank)], None, None
        return exchange.begin_scatter(grads[0], chunks.sizes(), backward=True).total(), None, None
