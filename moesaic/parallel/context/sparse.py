"""Sparse attention (DSA) over rows that lie on several ranks: every rank chooses for its own queries, and attends.

What others have of a token is narrow, the indexer's key and the latent: both go to every rank, and neither queries nor
outputs travel. What was chosen exists for a rank's own queries only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.interface import Batch, Kernels, LatentCall, Mask, RopeAngles, mask_of
from moesaic.kernels.token_selection import best_tokens
from moesaic.parallel.context.ulysses import expanded, rotated_rows
from moesaic.parallel.rows import RowGroup, RowSplit, gather_rows


def select_here(
    q_THC: Tensor,
    k_TC: Tensor,
    weights_TH: Tensor,
    layout: Batch,
    topk: int,
    split: RowSplit,
    ranks: RowGroup,
) -> list[Tensor | None]:
    """What this rank's queries chose, for each sequence that has more than `topk` tokens, though it be of no query: by
    what is None all ranks know that there is nothing to choose."""
    keys_TC = gather_rows(k_TC, split, ranks)
    selected: list[Tensor | None] = []
    for span, (rows, position_T, _) in zip(layout.spans, queries_here(split, ranks.rank, layout), strict=True):
        if span.total <= topk:
            selected.append(None)
        else:
            k_MC = keys_TC[span.start : span.stop]
            selected.append(best_tokens(q_THC[rows], k_MC, weights_TH[rows], position_T, topk))
    return selected


def attend_selected(plain: Kernels, call: LatentCall, rope: RopeAngles, split: RowSplit, ranks: RowGroup) -> Tensor:
    q_THC, latent_TX = rotated_rows(plain, call, rope)
    latent_TX = gather_rows(latent_TX, split, ranks)
    layout, selected = call.attention.layout, call.selected
    assert selected is not None
    # Of no row: so that a rank without any has its part in the backward pass.
    _, nothing_0HV = expanded(call, latent_TX[:0])
    pieces = [nothing_0HV, q_THC[:0].reshape(nothing_0HV.shape)]
    for span, (rows, position_T, seen) in zip(layout.spans, queries_here(split, ranks.rank, layout), strict=True):
        if not seen:
            continue
        k_MHC, v_MHV = expanded(call, latent_TX[span.start : span.start + seen])
        keep_TM = torch.arange(seen, device=q_THC.device) <= position_T[:, None]
        chosen_TK = selected[span.number]
        if chosen_TK is not None:
            keep_TM = keep_TM & mask_of(chosen_TK, span.total)[:, :seen]
        # The kernel takes queries for the last of the tokens, and so lets each see at least as far as it may.
        pieces.append(plain.attention(q_THC[rows], k_MHC, v_MHV, Mask(call.attention.scale, None, keep_TM)))
    return torch.cat(pieces)


class Queries(NamedTuple):
    """A rank's rows of one sequence, where in it they stand, and behind which token the last of them does."""

    rows: slice
    position_T: Tensor
    seen: int


def queries_here(split: RowSplit, rank: int, layout: Batch) -> list[Queries]:
    found, row = [], 0
    for span in layout.spans:
        own = [run for run in split.runs[rank] if run.sequence == span.number]
        places = [place for run in own for place in range(run.position, run.position + run.length)]
        position_T = torch.tensor(places, dtype=torch.int64).to(split.order_T.device)
        found.append(Queries(slice(row, row + len(places)), position_T, places[-1] + 1 if places else 0))
        row += len(places)
    return found
