"""DSA's choice of tokens (DeepSeek-V3.2, GLM-5): which earlier tokens a query attends to, by scores of light heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.kernels.interface import Batch, KVCache


def select_tokens(
    q_THC: Tensor,
    k_TC: Tensor,
    weights_TH: Tensor,
    layout: Batch,
    cache: KVCache | None,
    topk: int,
    best: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] | None = None,
) -> list[Tensor | None]:
    """For each sequence the places of the chosen tokens (new, topk), in order and -1 behind the last, or None where all
    are. `best` chooses them in one sequence."""
    selected: list[Tensor | None] = []
    for span in layout.spans:
        rows = slice(span.start, span.stop)
        if span.total <= topk or not span.new:
            selected.append(None)
            continue
        cached = cache is not None and (span.cached > 0 or cache["index"].dtype != k_TC.dtype)
        k_MC = layout.read(cache["index"], span) if cache is not None and cached else k_TC[rows]
        position_T = torch.arange(span.cached, span.total, device=k_MC.device)
        selected.append((best or best_tokens)(q_THC[rows], k_MC, weights_TH[rows], position_T, topk))
    return selected


def best_tokens(q_THC: Tensor, k_MC: Tensor, weights_TH: Tensor, position_T: Tensor, topk: int) -> Tensor:
    """Of one sequence: the queries at these positions, and all keys."""
    scores_TM = index_scores(q_THC, k_MC, weights_TH)
    behind_TM = torch.arange(len(k_MC), device=k_MC.device) > position_T[:, None]
    scores_TM = scores_TM.masked_fill(behind_TM, float("-inf"))
    # Rectified scores tie at zero, and a library's top-k breaks ties as it likes, differently for another length; here
    # the earliest token wins, so that a sequence gives the same answer however it was split.
    least_T1 = scores_TM.topk(topk, dim=-1).values[:, -1:]
    above_TM, tied_TM = scores_TM > least_T1, scores_TM == least_T1
    room_T1 = topk - above_TM.sum(-1, keepdim=True)
    chosen_TM = (above_TM | (tied_TM & (tied_TM.cumsum(-1) <= room_T1))) & ~behind_TM
    places_TM = torch.where(chosen_TM, torch.arange(len(k_MC), device=k_MC.device), len(k_MC))
    places_TK = places_TM.topk(topk, dim=-1, largest=False, sorted=True).values
    return torch.where(places_TK < len(k_MC), places_TK, -1).int()


def index_scores(q_THC: Tensor, k_MC: Tensor, weights_TH: Tensor) -> Tensor:
    """How well each query's light heads, weighed, think of every key of its sequence, in float32."""
    scores_THM = torch.relu(torch.matmul(q_THC.float(), k_MC.float().T) * q_THC.shape[2] ** -0.5)
    return torch.matmul(weights_TH.unsqueeze(1), scores_THM).squeeze(1)
