"""The kernels of the experts of a few tokens, quantized to 4 or 8 bits: two launches, no sorting by expert."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.quantized.matmul_kernels import summed


@triton.jit
def halves(rows):
    first, second = rows.reshape(2, rows.shape[0] // 2, rows.shape[1]).permute(1, 2, 0).split()
    return first, second


@triton.jit
def in_order(total, dots, weights):
    """Results (choices, columns), weighted and added one after the other."""
    if dots.shape[0] == 1:
        total = tl.fma(dots.reshape(total.shape), weights.reshape(total.shape), total)
    else:
        first, second = halves(dots)
        weight, next_weight = halves(weights)
        total = in_order(in_order(total, first, weight), second, next_weight)
    return total


@triton.jit
def hidden_kernel(
    x_TD,
    routes_N,
    codes_EGB,
    scales,
    zeros,
    hidden_NF,
    D,
    F,
    K: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one assignment's hidden row: gate, up, SwiGLU. Rows of the matmul are those of gate, then of up."""
    if PDL:
        # In this order: the kernel after this one reads the routes before it waits.
        gdc_wait()
        gdc_launch_dependents()
    assignment = tl.program_id(0)
    expert = tl.maximum(tl.load(routes_N + assignment), 0).to(tl.int64)  # -1: a row that is no token
    lane = tl.arange(0, LANES)
    pair = tl.arange(0, 2 * BN)
    n = tl.program_id(1) * BN + pair % BN
    row = pair // BN * F + n
    steps_at = expert * tl.cdiv(D, GROUP) * 2 * F + row
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + steps_at
    kind: tl.constexpr = hidden_NF.dtype.element_ty
    total = summed(
        x_TD + (assignment // K).to(tl.int64) * D + lane * 0, lane == 0, codes_EGB + (expert * 2 * F + row) * WIDTH,
        scales + steps_at, zeros_at, n < F, D, 2 * F, GROUP, BITS, HALF, kind, PRECISION, STAGES, PACKED,
    )  # fmt: skip
    both = tl.sum(tl.where(lane[None, :] == 0, total, 0.0), 1)
    both = both.to(kind).to(tl.float32).reshape(2, BN)
    upper = tl.arange(0, 2)[:, None] == 1
    gate = tl.sum(tl.where(upper, 0.0, both), 0)
    hidden = gate / (1.0 + tl.exp(-gate)) * tl.sum(tl.where(upper, both, 0.0), 0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(hidden_NF + assignment.to(tl.int64) * F + column, hidden.to(kind), mask=column < F)


@triton.jit
def output_kernel(
    hidden_NF,
    routes_N,
    weights_N,
    codes_EDB,
    scales,
    zeros,
    out_TD,
    D,
    F,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one token's output, all of its experts at once: lane j of the matmul is choice j, and of its rows
    (choice, n) only those of the same choice are kept."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    each = tl.arange(0, SLOTS * BN)
    choice, n = each // BN, tl.program_id(1) * BN + each % BN
    kind: tl.constexpr = out_TD.dtype.element_ty
    expert = tl.maximum(tl.load(routes_N + token * K + choice, mask=choice < K, other=0), 0).to(tl.int64)
    steps_at = expert * tl.cdiv(F, GROUP) * D + n
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + steps_at
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = summed(
        hidden_NF + (token * K + lane) * F, lane < K, codes_EDB + (expert * D + n) * WIDTH,
        scales + steps_at, zeros_at, (choice < K) & (n < D),
        F, D, GROUP, BITS, HALF, kind, PRECISION, STAGES, PACKED,
    )  # fmt: skip
    own = tl.sum(tl.where(lane[None, :] == choice[:, None], total, 0.0), 1)
    own = own.to(kind).to(tl.float32).reshape(SLOTS, BN)
    slot = tl.arange(0, SLOTS)
    weights = tl.load(weights_N + token * K + slot, mask=slot < K, other=0.0)
    out = in_order(tl.zeros([BN], tl.float32), own, tl.broadcast_to(weights[:, None], [SLOTS, BN]))
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(out_TD + token * D + column, out.to(kind), mask=column < D)
