"""One block of queries beside one block of keys, of which both may be pieces of several sequences: what attention finds
there, and how findings of several blocks become one.

A finding is an output that is right for the keys of the block, and the log-sum-exp of its scores, by which others are
weighed beside it. Plain PyTorch, a bounded number of scores at a time; a kernel for a GPU takes its place by
`RunAttention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.parallel.rows import Run

SCORES = 1 << 24  # at a time


class Rule(NamedTuple):
    """Scores times `scale`; a query sees its own position and `window - 1` before it, or all."""

    scale: float
    window: int | None = None


class RunAttention(Protocol):
    """Attention of one run of queries to one run of keys of the same sequence. `offset`: the position of the first key
    less that of the first query. Outputs and log-sum-exps are float32."""

    def forward(
        self, q_THC: Tensor, k_MNC: Tensor, v_MNV: Tensor, offset: int, rule: Rule
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, given: Given, k_MNC: Tensor, v_MNV: Tensor, offset: int, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, float32."""


class Given(NamedTuple):
    """What queries bring to a backward pass: the gradient of the outputs, their whole log-sum-exps (-inf nowhere: a
    query sees itself), and the sums of output times gradient."""

    q_THC: Tensor
    d_out_THV: Tensor
    sums_TH: Tensor
    products_TH: Tensor

    def rows(self, rows: slice) -> Given:
        return Given(*(part[rows] for part in self))


def visible_runs(
    queries: tuple[Run, ...], keys: tuple[Run, ...], window: int | None
) -> Iterator[tuple[slice, slice, int]]:
    """Runs of queries and of keys that see each other at all, as rows of their blocks, with the offset of positions."""
    by_sequence: dict[int, list[Run]] = {}
    for key in keys:
        by_sequence.setdefault(key.sequence, []).append(key)
    for query in queries:
        for key in by_sequence.get(query.sequence, ()):
            behind = query.position + query.length - 1 < key.position
            far = window is not None and key.position + key.length - 1 <= query.position - window
            if not behind and not far:
                rows = slice(query.row, query.row + query.length), slice(key.row, key.row + key.length)
                yield *rows, key.position - query.position


class Findings:
    """What the queries of a block found so far."""

    def __init__(self, out_THV: Tensor, sums_TH: Tensor) -> None:
        self.out_THV, self.sums_TH = out_THV, sums_TH

    @classmethod
    def none(cls, q_THC: Tensor, value_size: int) -> Findings:
        rows, heads = q_THC.shape[:2]
        out_THV = torch.zeros(rows, heads, value_size, dtype=torch.float32, device=q_THC.device)
        return cls(out_THV, out_THV.new_full((rows, heads), float("-inf")))

    def add(self, out_THV: Tensor, sums_TH: Tensor, rows: slice = slice(None)) -> None:
        old_TH = self.sums_TH[rows]
        new_TH = torch.logaddexp(old_TH, sums_TH)
        nothing_TH = new_TH == float("-inf")
        kept_TH1, added_TH1 = (
            (part_TH - new_TH).exp().masked_fill(nothing_TH, 0.0).unsqueeze(-1) for part_TH in (old_TH, sums_TH)
        )
        self.out_THV[rows] = self.out_THV[rows] * kept_TH1 + out_THV.float() * added_TH1
        self.sums_TH[rows] = new_TH


class PlainRunAttention:
    """A query head's rows of scores are those of its key head's group, so that a group is one product."""

    def forward(self, q_THC: Tensor, k_MNC: Tensor, v_MNV: Tensor, offset: int, rule: Rule) -> tuple[Tensor, Tensor]:
        out_THV = torch.empty(*q_THC.shape[:2], v_MNV.shape[2], dtype=torch.float32, device=q_THC.device)
        sums_TH = out_THV.new_empty(q_THC.shape[:2])
        k_NMC, v_NMV = k_MNC.transpose(0, 1).float(), v_MNV.transpose(0, 1).float()
        for rows in _parts(q_THC, k_MNC):
            scores_NGTM = _scores(q_THC[rows], k_NMC, offset - rows.start, rule)
            sums_NGT1 = scores_NGTM.logsumexp(-1, keepdim=True)
            # A query that sees no key of this block has found nothing: weights of zero.
            weights_NGTM = (scores_NGTM - sums_NGT1.masked_fill(sums_NGT1 == float("-inf"), 0.0)).exp_()
            out_THV[rows] = _by_token(weights_NGTM @ v_NMV.unsqueeze(1))
            sums_TH[rows] = _by_token(sums_NGT1).squeeze(-1)
        return out_THV, sums_TH

    def backward(
        self, given: Given, k_MNC: Tensor, v_MNV: Tensor, offset: int, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k_MNC.shape[1]
        k_NMC, v_NMV = k_MNC.transpose(0, 1).float(), v_MNV.transpose(0, 1).float()
        d_q_THC = torch.empty_like(given.q_THC, dtype=torch.float32)
        d_k_NMC, d_v_NMV = torch.zeros_like(k_NMC), torch.zeros_like(v_NMV)
        for rows in _parts(given.q_THC, k_MNC):
            part = given.rows(rows)
            q_NGTC, d_out_NGTV = (_by_group(x.float(), kv_heads) for x in (part.q_THC, part.d_out_THV))
            sums_NGT1, products_NGT1 = (_by_group(x.unsqueeze(-1), kv_heads) for x in (part.sums_TH, part.products_TH))
            weights_NGTM = (_scores(part.q_THC, k_NMC, offset - rows.start, rule) - sums_NGT1).exp_()
            d_v_NMV += (weights_NGTM.transpose(-1, -2) @ d_out_NGTV).sum(1)
            d_scores_NGTM = d_out_NGTV @ v_NMV.transpose(-1, -2).unsqueeze(1)
            d_scores_NGTM = d_scores_NGTM.sub_(products_NGT1).mul_(weights_NGTM).mul_(rule.scale)
            d_q_THC[rows] = _by_token(d_scores_NGTM @ k_NMC.unsqueeze(1))
            d_k_NMC += (d_scores_NGTM.transpose(-1, -2) @ q_NGTC).sum(1)
        return d_q_THC, d_k_NMC.transpose(0, 1), d_v_NMV.transpose(0, 1)


def _parts(q_THC: Tensor, k_MNC: Tensor) -> Iterator[slice]:
    rows = max(1, SCORES // max(1, q_THC.shape[1] * len(k_MNC)))
    for start in range(0, len(q_THC), rows):
        yield slice(start, min(start + rows, len(q_THC)))


def _scores(q_THC: Tensor, k_NMC: Tensor, offset: int, rule: Rule) -> Tensor:
    q_NGTC = _by_group(q_THC.float(), len(k_NMC))
    scores_NGTM = (q_NGTC @ k_NMC.transpose(-1, -2).unsqueeze(1)).mul_(rule.scale)
    new, total = len(q_THC), k_NMC.shape[1]
    some_behind = offset + total - 1 > 0
    some_far = rule.window is not None and offset <= new - 1 - rule.window
    if some_behind or some_far:
        query_T1 = torch.arange(new, device=q_THC.device)[:, None]
        key_M = torch.arange(offset, offset + total, device=q_THC.device)
        hidden_TM = key_M > query_T1
        if rule.window is not None:
            hidden_TM |= key_M <= query_T1 - rule.window
        scores_NGTM.masked_fill_(hidden_TM, float("-inf"))
    return scores_NGTM


def _by_group(x_THC: Tensor, kv_heads: int) -> Tensor:
    return x_THC.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _by_token(x_NGTC: Tensor) -> Tensor:
    return x_NGTC.permute(2, 0, 1, 3).flatten(1, 2)
