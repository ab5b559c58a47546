"""Router scores to experts: the K best of each token and their weights, one warp to a token, so that none waits.

The router's logits are a matrix product like any other (`linear`), kept in float32; products of bf16 numbers are exact
there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.linear import tiled
from moesaic.kernels.triton.overlap import launch_overlapped, overlaps


@triton.jit
def best_kernel(
    logits_TE,
    correction_E,
    places_T,
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
        # Not the first row, whatever it is: products of no rows at all are not made.
        nobody = tl.where(token > 0, tl.load(places_T + token), 0) < 0
        routes = tl.where(nobody, -1, routes)
    tl.store(routes_TK + token * K + slot, routes, mask=slot < K)
    tl.store(weights_TK + token * K + slot, weights * factor, mask=slot < K)


def route(
    h_TD: torch.Tensor,
    router_ED: torch.Tensor,
    correction_E: torch.Tensor | None,
    per_token: int,
    sigmoid: bool,
    normalize: bool,
    factor: float,
    places_T: torch.Tensor | None = None,
    routes_TK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen experts (T, K) int32, in `routes_TK` where that is given, and their float32 weights). Rows after
    the first whose place is negative are no tokens: their experts are -1."""
    T, E = h_TD.shape[0], router_ED.shape[0]
    logits_TE = tiled(h_TD, router_ED, out_dtype=torch.float32)
    if routes_TK is None:
        routes_TK = torch.empty(T, per_token, dtype=torch.int32, device=h_TD.device)
    weights_TK = torch.empty(T, per_token, dtype=torch.float32, device=h_TD.device)
    launch_overlapped(
        best_kernel,
        (T,),
        logits_TE,
        correction_E,
        places_T,
        routes_TK,
        weights_TK,
        E,
        1e-20 if sigmoid else 0.0,
        factor,
        K=per_token,
        SLOTS=triton.next_power_of_2(per_token),
        SIGMOID=sigmoid,
        NORMALIZE=normalize,
        BINS=max(32, triton.next_power_of_2(E)),
        OVERLAP=overlaps(h_TD.device),
        num_warps=1,
    )
    return routes_TK, weights_TK
