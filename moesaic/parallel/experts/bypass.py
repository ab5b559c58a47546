"""Redundancy-bypassing dispatch: a token that several experts of one rank want crosses the network once, each way.

The row travels once per rank that needs it, with which experts want it and their weights; that rank adds up its
experts' results and sends one row back. A token's sum is taken by rank first, so the last bits are
not one process's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels import reference
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.parallel.experts.dispatch import Compute, Finish
from moesaic.parallel.experts.exchange import Exchange


def begin_experts_once(x_TD: Tensor, routes: Routes, here: int, exchange: Exchange, compute: Compute) -> Finish:
    ranks, (tokens, per_token) = exchange.ranks, routes.experts_TK.shape
    # Pairs of a token and a rank that needs it, by rank and then by token; and each assignment's pair.
    rank_A = (routes.experts_TK // here).reshape(-1)
    token_A = torch.arange(tokens, device=x_TD.device).repeat_interleave(per_token)
    pairs_P, pair_A = torch.unique(rank_A * tokens + token_A, return_inverse=True)
    token_P, rank_P = pairs_P % max(1, tokens), pairs_P // max(1, tokens)
    rows_R = torch.bincount(rank_P, minlength=ranks)
    wanted_R = torch.bincount(rank_A, minlength=ranks)
    arriving_R2 = exchange.counts(torch.stack([rows_R, wanted_R], 1))
    leaving_rows, arriving_rows = rows_R.tolist(), arriving_R2[:, 0].tolist()
    leaving, arriving = wanted_R.tolist(), arriving_R2[:, 1].tolist()

    order_A = rank_A.argsort(stable=True)
    first_R = rows_R.cumsum(0) - rows_R  # where a rank's pairs begin
    wants_A2 = torch.stack([routes.experts_TK.reshape(-1) % here, pair_A - first_R[rank_A]], 1).index_select(0, order_A)
    rows_PD = exchange.rows(x_TD.index_select(0, token_P), leaving_rows, arriving_rows)
    weights_A1 = exchange.rows(routes.weights_TK.reshape(-1).index_select(0, order_A).unsqueeze(1), leaving, arriving)
    wants_A2 = exchange.numbers(wants_A2.to(torch.int32), leaving, arriving).long()

    def finish() -> Tensor:
        # Here: expand the rows for the experts that want them, compute, and add up what belongs to one row.
        came_R = torch.tensor(arriving_rows, device=x_TD.device)
        source_A = torch.arange(ranks, device=x_TD.device).repeat_interleave(torch.tensor(arriving, device=x_TD.device))
        row_A = wants_A2[:, 1] + (came_R.cumsum(0) - came_R)[source_A]
        sorted_A = wants_A2[:, 0].argsort(stable=True)
        row_A = row_A.index_select(0, sorted_A)
        counts_E = torch.bincount(wants_A2[:, 0], minlength=here)
        x_AD = rows_PD.wait().index_select(0, row_A)
        mine = Dispatched(x_AD, weights_A1.wait().index_select(0, sorted_A), counts_E, row_A, int(came_R.sum()))
        sums_PD = reference.combine(compute(mine, 0, here), mine)
        back_PD = exchange.rows(sums_PD, arriving_rows, leaving_rows).wait()
        return back_PD.new_zeros(tokens, back_PD.shape[1]).index_add(0, token_P, back_PD)

    return finish
