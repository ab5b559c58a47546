"""A few tokens at a time: two launches, no sorting, bound by how fast the experts' weights can be read.

Every assignment reads its expert's weights itself (two tokens with the same expert find them in the L2 cache). The dot
products run on the tensor cores, weights first, with one column of sixteen in use: they are free here, and they round
exactly as the kernels for many tokens do, so that a token's bits are the same alone and in any batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import is_hopper, launch_pdl, supports_pdl
from moesaic.kernels.triton.experts.gate import PLAIN, Gate, hidden_of
from moesaic.kernels.triton.experts.grouped import precision
from moesaic.kernels.triton.experts.hopper import decode as hopper_decode
from moesaic.kernels.triton.experts.tiles import Tile, launch_options

LANES = 16  # columns of a matmul; also the most experts of a token


@triton.jit
def hidden_kernel(
    x_TD,
    routes_N,
    gate_up_EGD,
    bias_EG,
    hidden_NF,
    D,
    F,
    IS_CLAMPED: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one assignment's hidden row: gate, up, and what `gate.py` makes of them."""
    if PDL:
        # In this order: the kernel after this one reads the routes before it waits.
        gdc_wait()
        gdc_launch_dependents()
    assignment = tl.program_id(0)
    expert = tl.maximum(tl.load(routes_N + assignment), 0).to(tl.int64)  # -1: a row that is no token
    lane = tl.arange(0, LANES)
    pair = tl.arange(0, 2 * BN)  # rows of gate, then of up
    n = tl.program_id(1) * BN + pair % BN
    k = tl.arange(0, BK)
    kind = hidden_NF.dtype.element_ty
    x_at = x_TD + (assignment // K).to(tl.int64) * D + k[:, None] + lane[None, :] * 0
    gate_up_at = gate_up_EGD + ((expert * 2 + pair // BN) * F + n)[:, None] * D + k[None, :]
    total = tl.zeros([2 * BN, LANES], tl.float32)
    for base in tl.range(0, D, BK, num_stages=STAGES):
        inside = k < D - base
        x = tl.load(x_at, mask=(lane[None, :] == 0) & inside[:, None], other=0.0)
        gate_up = tl.load(gate_up_at, mask=(n[:, None] < F) & inside[None, :], other=0.0)
        total = tl.dot(gate_up, x, total, input_precision=PRECISION)
        x_at += BK
        gate_up_at += BK
    both = tl.sum(tl.where(lane[None, :] == 0, total, 0.0), 1).to(kind).to(tl.float32)
    if bias_EG is not None:
        both += tl.load(bias_EG + (expert * 2 + pair // BN) * F + n, mask=n < F, other=0.0).to(tl.float32)
    gate, up = both.reshape(2, BN).permute(1, 0).split()
    hidden = hidden_of(gate, up, IS_CLAMPED)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(hidden_NF + assignment.to(tl.int64) * F + column, hidden.to(kind), mask=column < F)


@triton.jit
def output_kernel(
    hidden_NF,
    routes_N,
    weights_N,
    down_EDF,
    out_TD,
    D,
    F,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one token's output, all of its experts at once: lane j of the matmul is choice j, and of its
    rows (choice, n) only those of the same choice are kept."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    pair = tl.arange(0, SLOTS * BN)
    choice = pair // BN
    n = tl.program_id(1) * BN + pair % BN
    k = tl.arange(0, BK)
    expert = tl.maximum(tl.load(routes_N + token * K + choice, mask=choice < K, other=0), 0).to(tl.int64)
    kept = (choice < K) & (n < D)
    hidden_at = hidden_NF + (token * K + lane)[None, :] * F + k[:, None]
    down_at = down_EDF + (expert * D + n)[:, None] * F + k[None, :]
    total = tl.zeros([SLOTS * BN, LANES], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for base in tl.range(0, F, BK, num_stages=STAGES):
        inside = k < F - base
        hidden = tl.load(hidden_at, mask=(lane[None, :] < K) & inside[:, None], other=0.0)
        down = tl.load(down_at, mask=kept[:, None] & inside[None, :], other=0.0)
        total = tl.dot(down, hidden, total, input_precision=PRECISION)
        hidden_at += BK
        down_at += BK
    own = tl.sum(tl.where(lane[None, :] == choice[:, None], total, 0.0), 1)
    own = own.to(out_TD.dtype.element_ty).to(tl.float32).reshape(SLOTS, BN)
    slot = tl.arange(0, SLOTS)
    out = tl.zeros([BN], tl.float32)
    for j in tl.static_range(K):
        out += tl.load(weights_N + token * K + j) * tl.sum(tl.where(slot[:, None] == j, own, 0.0), 0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(out_TD + token * D + column, out.to(out_TD.dtype.element_ty), mask=column < D)


def decode(
    x_TD: torch.Tensor,
    routes_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    up_tile: Tile,
    down_tile: Tile,
    gate: Gate = PLAIN,
) -> torch.Tensor:
    (T, D), K, F = x_TD.shape, routes_TK.shape[1], down_EDF.shape[2]
    assert K <= LANES, f"at most {LANES} experts per token"
    hidden_NF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    common: dict[str, Any] = {"K": K, "LANES": LANES, "PRECISION": precision(x_TD), "PDL": supports_pdl(x_TD.device)}
    launch_pdl(
        hidden_kernel,
        (T * K, triton.cdiv(F, up_tile[0])),
        x_TD,
        routes_TK,
        gate_up_EGD,
        gate.bias_EG,
        hidden_NF,
        D,
        F,
        IS_CLAMPED=gate.clamped,
        **common,
        **launch_options(up_tile),
    )
    if is_hopper(x_TD.device) and hopper_decode.takes(D, F, K, x_TD.dtype):
        hopper_decode.output(hidden_NF, routes_TK, weights_TK, down_EDF, out_TD)
        return out_TD
    launch_pdl(
        output_kernel,
        (T, triton.cdiv(D, down_tile[0])),
        hidden_NF,
        routes_TK,
        weights_TK,
        down_EDF,
        out_TD,
        D,
        F,
        SLOTS=triton.next_power_of_2(K),
        **common,
        **launch_options(down_tile),
    )
    return out_TD
