"""The kernels of a few tokens' experts in 4 or 8 bits: two launches, no sorting, as in `decode.py`.

A token alone is bound by how long one product after the other takes, more than by how fast weights can be read. With 4
bits, products of several stretches of inputs are therefore taken at once, and only added in the order of `summed`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.coded_kernels import both_halves, summed


@triton.jit
def halves(rows):
    first, second = rows.reshape(2, rows.shape[0] // 2, rows.shape[1]).permute(1, 2, 0).split()
    return first, second


@triton.jit
def in_order(total, products, scales):
    """Products (places, rows of weights), scaled and added one after the other. Two places may share a scale."""
    if products.shape[0] == 1:
        total = tl.fma(products.reshape(total.shape), scales.reshape(total.shape), total)
    else:
        first, second = halves(products)
        scale, second_scale = scales, scales
        if scales.shape[0] > 1:
            scale, second_scale = halves(scales)
        total = in_order(in_order(total, first, scale), second, second_scale)
    return total


@triton.jit
def steps_at_once(at, there, base, INPUTS, OUTPUTS, GROUP: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Scales or zeros (places, rows of weights) of COUNT places that are SPAN inputs apart."""
    group = tl.minimum(base + tl.arange(0, COUNT) * SPAN, INPUTS - 1) // GROUP
    return tl.load(at[None, :] + (group * OUTPUTS)[:, None], mask=there[None, :], other=0.0).to(tl.float32)


@triton.jit
def inputs_of(x_at, valid, place, base, INPUTS, HALF: tl.constexpr):
    """What meets the low and the high half of the bytes from input `base` on."""
    low = tl.load(x_at + base, mask=valid[None, :] & (place < INPUTS - base), other=0.0)
    high = tl.load(x_at + base + HALF, mask=valid[None, :] & (place + HALF < INPUTS - base), other=0.0)
    return low, high


@triton.jit
def by_turn(first, second, CHUNK: tl.constexpr):
    """What came of the low and of the high half of each turn, one after the other."""
    ROWS: tl.constexpr = first.shape[0] // CHUNK
    return tl.join(first, second).reshape(CHUNK, ROWS, 2).permute(0, 2, 1).reshape(2 * CHUNK, ROWS)


@triton.jit
def with_turn(
    total,
    bytes,
    scales,
    low,
    high,
    own,
    zeros_at,
    there,
    base,
    INPUTS,
    OUTPUTS,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    kind: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The sum with the products of CHUNK turns from input `base` on."""
    codes_low, codes_high = both_halves(bytes, kind, PACKED)
    first = tl.sum(tl.where(own, tl.dot(codes_low, low, input_precision=PRECISION), 0.0), 1)
    second = tl.sum(tl.where(own, tl.dot(codes_high, high, input_precision=PRECISION), 0.0), 1)
    products = by_turn(first, second, CHUNK)
    if zeros_at is not None:
        ones = tl.full([16, HALF], 1.0, kind)
        sum_low = tl.max(tl.dot(ones, low, input_precision=PRECISION), 0)
        sum_high = tl.max(tl.dot(ones, high, input_precision=PRECISION), 0)
        first = tl.sum(tl.where(own, sum_low[None, :], 0.0), 1)
        second = tl.sum(tl.where(own, sum_high[None, :], 0.0), 1)
        zeros = steps_at_once(zeros_at, there, base, INPUTS, OUTPUTS, GROUP, 2 * CHUNK, HALF)
        products = tl.fma(-zeros, by_turn(first, second, CHUNK), products)
    return in_order(total, products, scales)


@triton.jit
def summed_at_once(
    x_at,
    valid,
    ahead,
    own,
    codes_at,
    kept,
    scales_at,
    zeros_at,
    there,
    INPUTS,
    OUTPUTS,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
    kind: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `summed` with 4 bits, for a token alone, where one product after the other would take too long: CHUNK turns of
    the loop there are one turn here, and only adding them is in order. Rows of the product are (turn, row of weights).
    Its lanes begin `ahead` inputs further on; of each row the lane that is its `own` is kept.

    Where AHEAD says how many turns there are, their codes are asked for before the inputs are there, and then all
    inputs at once."""
    STEP: tl.constexpr = 2 * HALF
    COUNT: tl.constexpr = CHUNK if GROUP % STEP == 0 else 2 * CHUNK  # scales: both halves of a byte may share one
    SPAN: tl.constexpr = STEP * CHUNK // COUNT
    ROWS: tl.constexpr = scales_at.shape[0]
    j = tl.arange(0, HALF)
    later = tl.arange(0, CHUNK * ROWS) // ROWS
    place = ahead[None, :] + j[:, None]
    x_at = x_at[None, :] + place
    codes_at = (codes_at + later * HALF)[:, None] + j[None, :]
    total = tl.zeros([ROWS], tl.float32)
    bytes = ()
    scales = ()
    inputs = ()
    for turn in tl.static_range(AHEAD):
        base = turn * STEP * CHUNK
        known = (kept & (later * STEP < INPUTS - base))[:, None]
        scale = steps_at_once(scales_at, there, base, INPUTS, OUTPUTS, GROUP, COUNT, SPAN)
        bytes = bytes + (tl.load(codes_at + turn * HALF * CHUNK, mask=known, other=0),)  # type: ignore[assignment]
        scales = scales + (scale,)  # type: ignore[assignment]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for turn in tl.static_range(AHEAD):
        low, high = inputs_of(x_at, valid, place, turn * STEP * CHUNK, INPUTS, HALF)
        inputs = inputs + (low, high)  # type: ignore[assignment]
    for turn in tl.static_range(AHEAD):
        total = with_turn(
            total, bytes[turn], scales[turn], inputs[2 * turn], inputs[2 * turn + 1], own, zeros_at, there,
            turn * STEP * CHUNK, INPUTS, OUTPUTS, GROUP, HALF, CHUNK, kind, PRECISION, PACKED,
        )  # fmt: skip
    if AHEAD == 0:
        for base in tl.range(0, INPUTS, STEP * CHUNK, num_stages=STAGES):
            code = tl.load(codes_at, mask=(kept & (later * STEP < INPUTS - base))[:, None], other=0)
            scale = steps_at_once(scales_at, there, base, INPUTS, OUTPUTS, GROUP, COUNT, SPAN)
            low, high = inputs_of(x_at, valid, place, base, INPUTS, HALF)
            total = with_turn(
                total, code, scale, low, high, own, zeros_at, there, base,
                INPUTS, OUTPUTS, GROUP, HALF, CHUNK, kind, PRECISION, PACKED,
            )  # fmt: skip
            codes_at += HALF * CHUNK
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
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One block of one assignment's hidden row: gate, up, SwiGLU. Rows of the product are those of gate, then of up."""
    if OVERLAP:
        # In this order: the kernel after this one reads the routes before it waits.
        gdc_wait()
        gdc_launch_dependents()
    assignment = tl.program_id(0)
    expert = tl.maximum(tl.load(routes_N + assignment), 0).to(tl.int64)  # -1: a row that is no token
    lane = tl.arange(0, LANES)
    each = tl.arange(0, CHUNK * 2 * BN)
    pair = each % (2 * BN)
    n = tl.program_id(1) * BN + pair % BN
    codes_at = codes_EGB + (expert * 2 * F + pair // BN * F + n) * WIDTH
    kind: tl.constexpr = hidden_NF.dtype.element_ty
    x_at = x_TD + (assignment // K).to(tl.int64) * D + lane * 0
    pair = tl.arange(0, 2 * BN)
    column = tl.program_id(1) * BN + pair % BN
    steps_at = expert * tl.cdiv(D, GROUP) * 2 * F + pair // BN * F + column
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + steps_at
    if BITS == 4:
        mine = lane[None, :] == each[:, None] // (2 * BN)  # lanes are the turns of a chunk
        both = summed_at_once(
            x_at, lane < CHUNK, lane * 2 * HALF, mine, codes_at, n < F, scales + steps_at, zeros_at, column < F,
            D, 2 * F, GROUP, HALF, CHUNK, kind, PRECISION, STAGES, PACKED, 0, False,
        )  # fmt: skip
    else:
        total = summed(
            x_at, lane == 0, codes_at, scales + steps_at, zeros_at, n < F,
            D, 2 * F, GROUP, BITS, HALF, kind, PRECISION, STAGES, PACKED,
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
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One block of one token's output, all of its experts at once: lane j of the product is choice j, and of its rows
    (choice, n) only those of the same choice are kept."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    each = tl.arange(0, CHUNK * SLOTS * BN)
    choice = each // BN % SLOTS
    n = tl.program_id(1) * BN + each % BN
    kind: tl.constexpr = out_TD.dtype.element_ty
    expert = tl.maximum(tl.load(routes_N + token * K + choice, mask=choice < K, other=0), 0).to(tl.int64)
    codes_at = codes_EDB + (expert * D + n) * WIDTH
    kept = (choice < K) & (n < D)
    pair = tl.arange(0, SLOTS * BN)
    column = tl.program_id(1) * BN + pair % BN
    expert = tl.maximum(tl.load(routes_N + token * K + pair // BN, mask=pair // BN < K, other=0), 0).to(tl.int64)
    steps_at = expert * tl.cdiv(F, GROUP) * D + column
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + steps_at
    if BITS == 4:
        mine = lane[None, :] == each[:, None] // BN  # lanes, as rows: a chunk's turns, and in each all choices
        own = summed_at_once(
            hidden_NF + (token * K + lane % SLOTS) * F, (lane % SLOTS < K) & (lane < CHUNK * SLOTS),
            lane // SLOTS * 2 * HALF, mine, codes_at, kept,
            scales + steps_at, zeros_at, (pair // BN < K) & (column < D),
            F, D, GROUP, HALF, CHUNK, kind, PRECISION, STAGES, PACKED, AHEAD, OVERLAP,
        )  # fmt: skip
    else:
        if OVERLAP:
            gdc_launch_dependents()
            gdc_wait()
        total = summed(
            hidden_NF + (token * K + lane) * F, lane < K, codes_at, scales + steps_at, zeros_at, kept,
            F, D, GROUP, BITS, HALF, kind, PRECISION, STAGES, PACKED,
        )  # fmt: skip
        own = tl.sum(tl.where(lane[None, :] == choice[:, None], total, 0.0), 1)
    own = own.to(kind).to(tl.float32).reshape(SLOTS, BN)
    slot = tl.arange(0, SLOTS)
    weights = tl.load(weights_N + token * K + slot, mask=slot < K, other=0.0)
    out = in_order(tl.zeros([BN], tl.float32), own, tl.broadcast_to(weights[:, None], [SLOTS, BN]))
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(out_TD + token * D + column, out.to(kind), mask=column < D)
