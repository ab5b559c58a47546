"""Router scores to experts: the K best of each token and their weights, one warp to a token, so that none waits.

The router's logits are a matrix product like any other (`linear`), kept in float32; products of bf16 numbers are exact
there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.linear import tiled
from moesaic.kernels.triton.norm import add_and_norm
from moesaic.kernels.triton.overlap import launch_overlapped, overlaps

FUSED = 2048  # wider rows are normed by more warps, in another order


@triton.jit
def best_kernel(
    logits_TE,
    correction_E,
    places_T,
    counts_E,
    routes_TK,
    weights_TK,
    E,
    tiny,
    factor,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BINS)
    real = expert < E
    logits = tl.load(logits_TE + token * E + expert, mask=real, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if correction_E is not None:
        choice += tl.load(correction_E + expert, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(real, choice, float("-inf"))
    slot = tl.arange(0, SLOTS)
    routes = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    total = 0.0
    for j in tl.static_range(K):
        # Of equal ones the first; whatever the scores are, an expert that exists.
        top, best = tl.max(choice, 0, return_indices=True)
        best = tl.minimum(best, E - 1)
        weight = top
        if correction_E is not None:
            weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        choice = tl.where(expert == best, float("-inf"), choice)
        routes = tl.where(slot == j, best, routes)
        weights = tl.where(slot == j, weight, weights)
        total += weight
    if NORMALIZE:
        weights = weights / (total + tiny)
    if places_T is not None:
        place = tl.load(places_T + token)
        tl.atomic_add(counts_E + routes, tl.full([SLOTS], 1, tl.int64), mask=slot < tl.where(place < 0, 0, K))
        # Not the first row, whatever it is: products of no rows at all are not made.
        routes = tl.where(tl.where(token > 0, place, 0) < 0, -1, routes)
    tl.store(routes_TK + token * K + slot, routes, mask=slot < K)
    tl.store(weights_TK + token * K + slot, weights * factor, mask=slot < K)


@triton.jit
def normed_scores_kernel(
    x_D,
    more_D,
    norm_D,
    router_ED,
    sum_D,
    h_D,
    logits_E,
    D,
    E,
    eps,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    LINES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: its sum and norm, made by every program for itself, and the scores of some experts."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BLOCK)
    inside = column < D
    if OVERLAP:  # weights do not change: have them read while the row is still being made
        line = tl.minimum(tl.arange(0, LINES) * 64, D - 1)
        ahead = router_ED + tl.minimum(n, E - 1)[:, None].to(tl.int64) * D + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ahead.to(tl.int64, bitcast=True)], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        gdc_launch_dependents()
        gdc_wait()
    kind = h_D.dtype.element_ty
    both = tl.load(x_D + column, mask=inside, other=0.0).to(tl.float32)
    both = (both + tl.load(more_D + column, mask=inside, other=0.0).to(tl.float32)).to(kind)
    wide = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    if tl.program_id(0) == 0:
        weight = tl.load(norm_D + column, mask=inside, other=0.0)
        tl.store(sum_D + column, both, mask=inside)
        tl.store(h_D + column, (wide * scale).to(kind) * weight.to(kind), mask=inside)
    k = tl.arange(0, BK)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES, BN], tl.float32)
    for base in tl.range(0, D, BK, num_stages=STAGES):
        at = base + k
        known = at < D
        part = tl.load(x_D + at, mask=known, other=0.0).to(tl.float32)
        part = (part + tl.load(more_D + at, mask=known, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        h = (part * scale).to(kind) * tl.load(norm_D + at, mask=known, other=0.0).to(kind)
        rows = tl.where(lane[:, None] == 0, h[None, :], tl.zeros([LANES, BK], kind))
        router = tl.load(
            router_ED + n[None, :].to(tl.int64) * D + at[:, None], mask=known[:, None] & (n[None, :] < E), other=0.0
        )
        total = tl.dot(rows, router, total, input_precision=PRECISION)
    own = tl.sum(tl.where(lane[:, None] == 0, total, 0.0), 0)
    tl.store(logits_E + n, own, mask=n < E)


@dataclass(frozen=True)
class Choice:
    """How experts are chosen from scores, and where the choice goes.

    Rows after the first whose place is negative are no tokens: their experts are -1, and they are not counted.
    """

    per_token: int
    sigmoid: bool
    normalize: bool
    factor: float
    places_T: torch.Tensor | None = None
    routes_TK: torch.Tensor | None = None
    counts_E: torch.Tensor | None = None  # int64, counted on; with `places_T`


def best(logits_TE: torch.Tensor, correction_E: torch.Tensor | None, choice: Choice):
    """(chosen experts (T, K) int32, their float32 weights)."""
    T, E = logits_TE.shape
    device, K = logits_TE.device, choice.per_token
    routes_TK = choice.routes_TK
    if routes_TK is None:
        routes_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    weights_TK = torch.empty(T, K, dtype=torch.float32, device=device)
    launch_overlapped(
        best_kernel,
        (T,),
        logits_TE,
        correction_E,
        choice.places_T,
        choice.counts_E,
        routes_TK,
        weights_TK,
        E,
        1e-20 if choice.sigmoid else 0.0,
        choice.factor,
        K=K,
        SLOTS=triton.next_power_of_2(K),
        SIGMOID=choice.sigmoid,
        NORMALIZE=choice.normalize,
        BINS=max(32, triton.next_power_of_2(E)),
        OVERLAP=overlaps(device),
        num_warps=1,
    )
    return routes_TK, weights_TK


def route(h_TD: torch.Tensor, router_ED: torch.Tensor, correction_E: torch.Tensor | None, choice: Choice):
    """(chosen experts (T, K) int32, their float32 weights)."""
    return best(tiled(h_TD, router_ED, out_dtype=torch.float32), correction_E, choice)


def norm_and_route(
    x_TD: torch.Tensor,
    more_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    router_ED: torch.Tensor,
    correction_E: torch.Tensor | None,
    choice: Choice,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + more, its norm, the weights of the experts chosen for that). One row alone has its norm and its scores made
    by one kernel, to the same bits; `FUSED` says up to which width."""
    (T, D), E = x_TD.shape, router_ED.shape[0]
    if T > 1 or D > FUSED:
        sum_TD, h_TD = add_and_norm(x_TD, more_TD, norm_D, eps)
        return sum_TD, h_TD, route(h_TD, router_ED, correction_E, choice)[1]
    sum_TD, h_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    logits_TE = torch.empty(T, E, dtype=torch.float32, device=x_TD.device)
    launch_overlapped(
        normed_scores_kernel,
        (triton.cdiv(E, 16),),
        x_TD,
        more_TD,
        norm_D,
        router_ED,
        sum_TD,
        h_TD,
        logits_TE,
        D,
        E,
        eps,
        BLOCK=triton.next_power_of_2(D),
        BN=16,
        BK=min(512, triton.next_power_of_2(D)),
        LANES=16,
        LINES=triton.next_power_of_2(triton.cdiv(D, 64)),
        PRECISION="ieee" if x_TD.dtype == torch.float32 else "tf32",
        STAGES=3 if x_TD.dtype != torch.float32 else 1,
        OVERLAP=overlaps(x_TD.device),
        num_warps=4,  # as many as the norm alone has: its sum must be taken in the same order
    )
    return sum_TD, h_TD, best(logits_TE, correction_E, choice)[1]
