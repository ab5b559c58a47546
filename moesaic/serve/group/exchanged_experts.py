"""Whole experts on ranks: assignments are computed where their expert lies, and a row's owner adds them up.

All rows of a data-parallel rank are known on its tensor ranks, so between these nothing is dispatched: each computes
its experts' assignments and sends the results to the rows' owners (a share of the rows each), who add them in the order
of experts, as one process does; then rows are gathered. Between data-parallel ranks owners dispatch their rows first.
A rank without rows takes part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.serve.group.placement import Placement
from moesaic.serve.group.shares import spans
from moesaic.serve.group.worker_group import WorkerGroup


class Assignments(NamedTuple):
    """Some rows' assignments to experts, sorted by the rank that computes them, then by expert."""

    row_A: Tensor
    expert_A: Tensor
    place_A: Tensor  # of the expert, on its rank
    weight_A: Tensor
    counts: list[int]  # for each rank

    def to(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


def assignments(routes: Routes, rows: tuple[int, int], placement: Placement, ranks: int) -> Assignments:
    """Of the rows from `rows[0]` to before `rows[1]`."""
    chosen_TK = routes.experts_TK[rows[0] : rows[1]]
    flat_A = chosen_TK.reshape(-1)
    rank_A, place_A = placement.of(flat_A)
    order_A = flat_A.argsort(stable=True)
    order_A = order_A[rank_A[order_A].argsort(stable=True)]
    row_A = rows[0] + order_A // chosen_TK.shape[1]
    weight_A = routes.weights_TK[rows[0] : rows[1]].reshape(-1)[order_A]
    return Assignments(row_A, flat_A[order_A], place_A[order_A], weight_A, rank_A.bincount(minlength=ranks).tolist())


def exchanged_experts(
    x_TD: Tensor, routes: Routes, weights: ExpertWeights, placement: Placement, group: WorkerGroup, plain: Kernels
) -> Tensor:
    link, tensor, ranks = group.experts, group.tensor, group.layout.ep
    shares = spans(len(x_TD), tensor.size)
    # Those of the ranks that compute this one's rows which know them already: its own tensor ranks.
    near = {at: tensor.members.index(rank) for at, rank in enumerate(link.members) if rank in tensor.members}
    if len(near) == ranks and not len(x_TD):
        return x_TD
    mine = assignments(routes, shares[tensor.index], placement, ranks)
    wanted = {at: assignments(routes, shares[place], placement, ranks) for at, place in near.items()}

    x_parts, place_parts, weight_parts, sizes = [], [], [], [0] * ranks
    for at, theirs in wanted.items():
        own = theirs.to(link.index)
        sizes[at] = own.stop - own.start
        x_parts.append(x_TD[theirs.row_A[own]])
        place_parts.append(theirs.place_A[own])
        weight_parts.append(theirs.weight_A[own])
    if len(near) < ranks:
        far, came = _dispatch(x_TD, mine, group, near)
        for at, count in enumerate(came):
            sizes[at] = count if at not in near else sizes[at]
        x_far, place_far, weight_far = far
        # In the order of ranks: those before the near ones, then the near, then those behind.
        before = sum(came[: min(near)])
        x_parts = [x_far[:before], *x_parts, x_far[before:]]
        place_parts = [place_far[:before], *place_parts, place_far[before:]]
        weight_parts = [weight_far[:before], *weight_parts, weight_far[before:]]
    x_AD, place_A1 = torch.cat(x_parts), torch.cat(place_parts).unsqueeze(1)
    weight_A1 = torch.cat(weight_parts).unsqueeze(1)
    y_AD = plain.experts(x_AD, Routes(place_A1, weight_A1), weights) if len(x_AD) else x_AD

    found_AD = link.exchange(y_AD, sizes, mine.counts, "expert results")
    order_A = mine.expert_A.argsort(stable=True)
    start, stop = shares[tensor.index]
    own_ND = found_AD.new_zeros(stop - start, x_TD.shape[1])
    own_ND = own_ND.index_add(0, mine.row_A[order_A] - start, found_AD[order_A])
    return tensor.rows(own_ND, [stop - start for start, stop in shares], "rows")


def _dispatch(
    x_TD: Tensor, mine: Assignments, group: WorkerGroup, near: dict[int, int]
) -> tuple[tuple[Tensor, Tensor, Tensor], list[int]]:
    """This rank's rows to the experts of other data-parallel ranks, and theirs for its own: rows, each expert's place
    here and weight, by the rank they come from; and how many those are."""
    link = group.experts
    leaving = [0 if at in near else count for at, count in enumerate(mine.counts)]
    numbers = torch.tensor(leaving, dtype=torch.int32, device=x_TD.device).unsqueeze(1)
    each = [1] * link.size
    arriving = link.exchange(numbers, each, each, "expert counts").flatten().tolist()
    far_R = torch.tensor([at not in near for at in range(link.size)], device=x_TD.device)
    far_A = far_R.repeat_interleave(torch.tensor(mine.counts, device=x_TD.device)).nonzero().squeeze(1)
    # One message: a row's bytes, its weight's and its expert's.
    rows = x_TD[mine.row_A[far_A]]
    packed = torch.cat(
        [
            rows.view(torch.uint8),
            mine.weight_A[far_A].float().unsqueeze(1).view(torch.uint8),
            mine.place_A[far_A].to(torch.int32).unsqueeze(1).view(torch.uint8),
        ],
        1,
    )
    found = link.exchange(packed, leaving, arriving, "expert rows")
    wide = rows.shape[1] * rows.element_size()
    x_AD = found[:, :wide].contiguous().view(rows.dtype)
    weight_A = found[:, wide : wide + 4].contiguous().view(torch.float32).flatten()
    place_A = found[:, wide + 4 :].contiguous().view(torch.int32).flatten().long()
    return (x_AD, place_A, weight_A), arriving
