"""Each assignment's row to the rank of its expert and back, padding-free (X-MoE), in a fixed order (UniEP).

Rows are sorted by expert, then by the rank they come from, then by their place there: the order one process would have
them in. An expert sees the same rows in the same order, and a token adds up what comes back in the same order, so
outputs and gradients are those of one process to the bit. With `chunks` the experts of every rank are taken in groups
(Comet's split along the dimension nothing depends on): rows of the next group travel while this one computes, and the
matmuls are the same ones, so overlap changes no bit either. Everything leaves in `begin_experts`, and is computed on
arrival in what that returns: between the two there is time for work that needs no other rank, as a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import reference
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.parallel.experts.exchange import Exchange

# (rows sorted by expert with their weights and counts, first and last expert of this rank) -> weighted results
Compute = Callable[[Dispatched, int, int], Tensor]
Finish = Callable[[], Tensor]


def begin_experts(
    x_TD: Tensor,
    routes: Routes,
    here: int,
    exchange: Exchange,
    compute: Compute,
    chunks: int = 1,
    by_source: bool = False,
) -> Finish:
    """`here`: experts of each rank; rank r holds those from r * here on. `by_source` computes every rank's rows by
    themselves: the matmuls of one process that takes the ranks' batches one after the other."""
    sent = reference.dispatch(x_TD, routes, here * exchange.ranks)
    finish = begin_rows(sent, here, exchange, compute, chunks, by_source)
    return lambda: reference.combine(finish(), sent)


def begin_rows(
    sent: Dispatched, here: int, exchange: Exchange, compute: Compute, chunks: int = 1, by_source: bool = False
) -> Finish:
    """Of rows that are sorted by expert already; what comes back is in the same order, not yet added up."""
    ranks = exchange.ranks
    leaving_RE = sent.counts_E.view(ranks, here)
    arriving_RE = exchange.counts(leaving_RE)
    starts_RE = (sent.counts_E.cumsum(0) - sent.counts_E).view(ranks, here)
    bounds = _bounds(here, chunks)

    travelling = []
    for first, last in bounds:  # all begin before any is waited for
        leaving, arriving = leaving_RE[:, first:last], arriving_RE[:, first:last]
        index_A = _segments(starts_RE[:, first], leaving.sum(1))
        splits = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        rows = exchange.rows(sent.x_AD.index_select(0, index_A), *splits)
        weights = exchange.rows(sent.weights_A1.index_select(0, index_A), *splits)
        travelling.append((index_A, splits, arriving, rows, weights))

    def finish() -> Tensor:
        return _compute_and_return(travelling, bounds, exchange, compute, by_source)

    return finish


def _compute_and_return(
    travelling: list[Any], bounds: list[tuple[int, int]], exchange: Exchange, compute: Compute, by_source: bool
) -> Tensor:
    returning, places = [], []
    for (first, last), (index_A, splits, arriving_RC, rows, weights) in zip(bounds, travelling, strict=True):
        if by_source:
            back_AD = _by_source(rows.wait(), weights.wait(), arriving_RC, compute, first, last)
        else:
            order_A = _by_expert(arriving_RC)
            x_AD, weights_A1 = (part.wait().index_select(0, order_A) for part in (rows, weights))
            y_AD = compute(Dispatched(x_AD, weights_A1, arriving_RC.sum(0), order_A, len(order_A)), first, last)
            back_AD = y_AD.index_select(0, inverse(order_A))  # as they came: by rank, then by expert
        returning.append(exchange.rows(back_AD, splits[1], splits[0]))
        places.append(index_A)
    return torch.cat([part.wait() for part in returning]).index_select(0, inverse(torch.cat(places)))


def _by_source(
    x_AD: Tensor, weights_A1: Tensor, arriving_RC: Tensor, compute: Compute, first: int, last: int
) -> Tensor:
    """Rows as they came, by rank and then by expert. The last rank's come first: gradients of one weight are added up
    in the opposite order, which is then that of the ranks."""
    sizes = arriving_RC.sum(1).tolist()
    parts = list(zip(x_AD.split(sizes), weights_A1.split(sizes), arriving_RC, strict=True))
    done = [
        compute(Dispatched(x, weights, counts_C, torch.arange(len(x), device=x.device), len(x)), first, last)
        for x, weights, counts_C in reversed(parts)
    ]
    return torch.cat(done[::-1])


def _bounds(here: int, chunks: int) -> list[tuple[int, int]]:
    chunks = max(1, min(chunks, here))
    edges = [here * number // chunks for number in range(chunks + 1)]
    return list(pairwise(edges))


def _segments(starts_R: Tensor, lengths_R: Tensor) -> Tensor:
    """start, start + 1, ... of every segment, one after the other."""
    offsets_R = lengths_R.cumsum(0) - lengths_R
    total = int(lengths_R.sum())
    return torch.arange(total, device=starts_R.device) + (starts_R - offsets_R).repeat_interleave(lengths_R)


def _by_expert(arriving_RC: Tensor) -> Tensor:
    """Rows came by rank, and from each rank by expert; their places by expert, and for each expert by rank."""
    ranks, experts = arriving_RC.shape
    kinds = torch.arange(experts, device=arriving_RC.device).repeat(ranks)
    return kinds.repeat_interleave(arriving_RC.reshape(-1)).argsort(stable=True)


def inverse(order_A: Tensor) -> Tensor:
    return torch.empty_like(order_A).scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
