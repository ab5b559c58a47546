"""Router scores to experts: the K best of each token and their weights, one warp to a token, so that none waits.

The router's logits are a matmul like any other (`linear`), kept in float32; products of two bf16 numbers are exact
there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.layer_weights import RouteRules
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl
from moesaic.kernels.triton.linear import tiled


@triton.jit
def in_top_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Only the groups whose two best experts have the largest sums; of equal groups the first."""
    SIZE: tl.constexpr = choice.shape[0] // GROUPS
    by_group = choice.reshape(GROUPS, SIZE)
    first, at = tl.max(by_group, 1, return_indices=True)
    second = tl.max(tl.where(tl.arange(0, SIZE)[None, :] == at[:, None], float("-inf"), by_group), 1)
    sums, group = first + second, tl.arange(0, GROUPS)
    ahead = (group[None, :] < group[:, None]) & (sums[None, :] == sums[:, None])
    rank = tl.sum(((sums[None, :] > sums[:, None]) | ahead).to(tl.int32), 1)
    return tl.where((rank < TOP_GROUPS)[:, None], by_group, float("-inf")).reshape(choice.shape)


@triton.jit
def topk_kernel(
    logits_TE,
    bias_E,
    correction_E,
    positions_T,
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
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BINS)
    real = expert < E
    logits = tl.load(logits_TE + token * E + expert, mask=real, other=float("-inf"))
    if bias_E is not None:
        logits += tl.load(bias_E + expert, mask=real, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if correction_E is not None:
        choice += tl.load(correction_E + expert, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        choice = in_top_groups(choice, GROUPS, TOP_GROUPS)
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
    if positions_T is not None:
        position = tl.load(positions_T + token)
        tl.atomic_add(counts_E + routes, tl.full([SLOTS], 1, tl.int64), mask=slot < tl.where(position < 0, 0, K))
        # Not the first row, whatever it is: matmuls of no rows at all are not made.
        routes = tl.where(tl.where(token > 0, position, 0) < 0, -1, routes)
    tl.store(routes_TK + token * K + slot, routes, mask=slot < K)
    tl.store(weights_TK + token * K + slot, weights * factor, mask=slot < K)


@dataclass(frozen=True)
class TopK:
    """How experts are chosen from scores, and where the choice goes.

    Rows after the first whose position is negative are no tokens: their experts are -1, and they are not counted.
    """

    per_token: int
    sigmoid: bool
    normalize: bool
    factor: float
    groups: int = 1  # of which experts are taken from the best `top_groups` only
    top_groups: int = 1
    positions_T: torch.Tensor | None = None
    routes_TK: torch.Tensor | None = None
    counts_E: torch.Tensor | None = None  # int64, counted on; with `places_T`

    @classmethod
    def by(cls, rules: RouteRules, *where: torch.Tensor) -> TopK:
        """`where` are the tensors of the last fields."""
        sigmoid = rules.score == "sigmoid"
        return cls(rules.per_token, sigmoid, rules.normalize, rules.scale, rules.groups, rules.top_groups, *where)


def supports_groups(experts: int, groups: int) -> bool:
    """Groups must lie as powers of two do."""
    return groups == 1 or (experts >= 32 and experts & (experts - 1) == 0)


def route(
    h_TD: torch.Tensor,
    router_ED: torch.Tensor,
    correction_E: torch.Tensor | None,
    choice: TopK,
    bias_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen experts (T, K) int32, their float32 weights)."""
    return topk(router_logits(h_TD, router_ED), correction_E, choice, bias_E)


def router_logits(h_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    return tiled(h_TD, router_ED, out_dtype=torch.float32)


def topk(
    logits_TE: torch.Tensor, correction_E: torch.Tensor | None, choice: TopK, bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    (T, E), K, device = logits_TE.shape, choice.per_token, logits_TE.device
    routes_TK = choice.routes_TK
    if routes_TK is None:
        routes_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    weights_TK = torch.empty(T, K, dtype=torch.float32, device=device)
    launch_pdl(
        topk_kernel,
        (T,),
        logits_TE,
        bias_E,
        correction_E,
        choice.positions_T,
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
        GROUPS=choice.groups,
        TOP_GROUPS=choice.top_groups,
        PDL=supports_pdl(device),
        num_warps=1,
    )
    return routes_TK, weights_TK
