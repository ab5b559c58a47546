"""The kernels of `decode.py`: a warp asks for all codes of its rows at once, and unpacks what has come.

Sixteen inputs in a row make a matmul, four matmuls follow each other (`registers.py`), and what these 64 inputs
make is scaled and added in order. So does `matmul_kernels.py`, with as many tokens as there are: a token's bits are the
same there.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.quantized.registers import codes_of, dots_of, sums_of, transposed_word

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6


@gluon.jit
def scales_of(at, FIRST: gl.constexpr, LAST: gl.constexpr, OUTPUTS, GROUP: gl.constexpr):
    """Scales or zeros of each 64 inputs of blocks. May be none."""
    found = None
    if at is not None:
        found = ()
        for block in gl.static_range(FIRST, LAST):
            low = gl.load(at + block * 128 // GROUP * OUTPUTS)
            high = low
            if GROUP % 128 != 0:
                high = gl.load(at + (block * 128 + 64) // GROUP * OUTPUTS)
            found = found + (low, high)
    return found


@gluon.jit
def round_summed(
    total,
    codes_at,
    x_at,
    odd,
    scales_at,
    zeros_at,
    OUTPUTS,
    thin: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    WAITS: gl.constexpr,
):
    codes = codes_of(codes_at, FIRST, LAST, BITS)
    scales = scales_of(scales_at, FIRST, LAST, OUTPUTS, GROUP)
    zeros = scales_of(zeros_at, FIRST, LAST, OUTPUTS, GROUP)
    if WAITS:
        gdc_launch_dependents()
        gdc_wait()
    else:
        barrier()  # else the compiler asks for codes when they are needed
    for block in gl.static_range(0, LAST - FIRST, 2):
        at = x_at + (FIRST + block) * 32
        if FIRST + block + 1 == LAST:
            at -= odd
        x_low, x_high = gl.load(at), gl.load(at + 16)
        dots = dots_of(codes, block, x_low, x_high, thin, BITS)
        if zeros is not None:
            sums = sums_of(x_low, x_high, thin)
        for half in gl.static_range(2 if FIRST + block + 1 == LAST else 4):
            dot = dots[half]
            if zeros is not None:
                dot = gl.fma(-zeros[2 * block + half].to(gl.float32), sums[half], dot)
            total = gl.fma(dot, scales[2 * block + half].to(gl.float32), total)
    return total


@gluon.jit
def summed(
    codes_at,
    x_at,
    odd,
    scales_at,
    zeros_at,
    OUTPUTS,
    thin: gl.constexpr,
    INPUTS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    WAITS: gl.constexpr,
):
    """The dot products of eight rows with x: rows g + 8 are the same rows with every other block, and so are odd
    columns of x, which lie `odd` further on.

    With WAITS, x is there only after the launch before this one; the first codes are asked for before that."""
    total = gl.zeros([8, codes_at.shape[1] // 4], gl.float32, thin)
    BLOCKS: gl.constexpr = INPUTS // 128
    ROUNDS: gl.constexpr = (BLOCKS + 2 * IN_FLIGHT - 1) // (2 * IN_FLIGHT)
    PER_ROUND: gl.constexpr = (BLOCKS + 2 * ROUNDS - 1) // (2 * ROUNDS) * 2
    for number in gl.static_range(ROUNDS):
        total = round_summed(
            total, codes_at, x_at, odd, scales_at, zeros_at, OUTPUTS, thin,
            number * PER_ROUND, BLOCKS if number == ROUNDS - 1 else (number + 1) * PER_ROUND, GROUP, BITS,
            WAITS and number == 0,
        )  # fmt: skip
    return total


@gluon.jit
def rows_kernel(
    x_TI,
    codes_OB,
    scales,
    zeros,
    bias_O,
    out_TO,
    T,
    OUTPUTS,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    TOKENS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Eight columns of four rows' results, by one warp: even columns of x are the rows with every other block, odd
    ones the same rows with the others, and what comes of them is in thread t for row t."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    column, first = gl.program_id(0) * 8, gl.program_id(1) * TOKENS
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    word = gl.arange(0, 16, gl.SliceLayout(0, wide))
    codes_at = codes_OB + ((column + g) * (INPUTS // 32 * BITS))[:, None] + word[None, :]
    token = gl.minimum(first + g // 2, T - 1).to(gl.int64)
    odd = (g % 2 * 32)[:, None]
    x_at = x_TI + (token * (INPUTS // 4))[:, None] + odd + transposed_word(word)[None, :]
    n = column + gl.arange(0, 8, gl.SliceLayout(1, thin))
    row = first + gl.arange(0, 4, gl.SliceLayout(0, thin))
    at = n[:, None] + 0 * row[None, :]
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + at
    total = summed(codes_at, x_at, odd, scales + at, zeros_at, OUTPUTS, thin, INPUTS, IN_FLIGHT, GROUP, BITS, PDL)
    if bias_O is not None:
        total += gl.load(bias_O + at).to(gl.float32)
    out_at = out_TO + row.to(gl.int64)[None, :] * OUTPUTS + n[:, None]
    gl.store(out_at, total.to(out_TO.dtype.element_ty), mask=(row < T)[None, :].broadcast_to([8, 4]))


@gluon.jit
def by_lane(of_four, t):
    """Thread t's one of four numbers that all threads of a row have alike."""
    return gl.where(t < 2, gl.where(t == 0, of_four[0], of_four[1]), gl.where(t == 2, of_four[2], of_four[3]))


@gluon.jit
def rows_together(first, second, W: gl.constexpr):
    """(inputs, rows) of what two times eight rows of each of W warps have."""
    both = gl.join(first, second).reshape([W, 8, first.shape[1], 2])
    return both.permute([2, 0, 3, 1]).reshape([first.shape[1], 16 * W])


@gluon.jit
def hidden_round(
    x_at,
    codes_at,
    at,
    scales,
    zeros,
    dots,
    factors,
    F,
    thin: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Sums of 64 inputs each, and what they are to be multiplied with, to shared memory."""
    W: gl.constexpr = 4 // SPLIT
    lane = gl.arange(0, 4 * SPLIT, gl.SliceLayout(0, thin))
    t = (lane % 4)[None, :].broadcast_to([8 * W, 4 * SPLIT])
    x, codes, own_scales, own_zeros = (), (), (), ()
    for step in gl.static_range(FIRST, LAST):
        here = x_at + step * 64 * SPLIT
        x = x + (gl.load(here), gl.load(here + 16))
    barrier()  # x first: it is there before it is known which codes are wanted
    for step in gl.static_range(FIRST, LAST):
        for second in gl.static_range(2):
            codes = codes + codes_of(codes_at + second * (D // 8 * BITS), 2 * step * SPLIT, 2 * step * SPLIT + 2, BITS)
    for step in gl.static_range(FIRST, LAST):
        place = step * 256 * SPLIT + lane // 4 * 256 + lane % 4 * 64
        here = at[:, None] + (place // GROUP * 2 * F)[None, :]
        for second in gl.static_range(2):
            own_scales = own_scales + (gl.load(scales + here + 4 * second),)
            if zeros is not None:
                own_zeros = own_zeros + (gl.load(zeros + here + 4 * second),)
    barrier()  # else the compiler asks for codes when they are needed
    for step in gl.static_range(LAST - FIRST):
        x_low, x_high = x[2 * step], x[2 * step + 1]
        first = by_lane(dots_of(codes, 4 * step, x_low, x_high, thin, BITS), t)
        second = by_lane(dots_of(codes, 4 * step + 2, x_low, x_high, thin, BITS), t)
        if zeros is not None:
            sums = by_lane(sums_of(x_low, x_high, thin), t)
            first = gl.fma(-own_zeros[2 * step].to(gl.float32), sums, first)
            second = gl.fma(-own_zeros[2 * step + 1].to(gl.float32), sums, second)
        dots.index(FIRST + step).store(rows_together(first, second, W))
        factors.index(FIRST + step).store(rows_together(own_scales[2 * step], own_scales[2 * step + 1], W))


@gluon.jit
def hidden_kernel(
    x_TD,
    routes_N,
    codes_EGB,
    scales,
    zeros,
    hidden_NF,
    F,
    D: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    SPLIT: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    PDL: gl.constexpr,
):
    """A few columns of one assignment's hidden row, by four warps: SPLIT of them share the inputs. A warp has twice
    four rows of gate and four of up, with the same x: reading x takes longest, once the codes are there. Sums of 64
    inputs go through shared memory, and are scaled and added in order. Columns of the hidden row lie as codes do."""
    if PDL:
        # In this order: the kernel after this one reads the routes before it waits.
        gdc_wait()
        gdc_launch_dependents()
    W: gl.constexpr = 4 // SPLIT
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [W, SPLIT], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [W, SPLIT], [1, 0])
    assignment = gl.program_id(0)
    column = gl.program_id(1) * 8 * W
    expert = gl.maximum(gl.load(routes_N + assignment), 0).to(gl.int64)  # -1: a row that is no token
    row = gl.arange(0, 8 * W, gl.SliceLayout(1, wide))
    lane = gl.arange(0, 16 * SPLIT, gl.SliceLayout(0, wide))
    part, word = gl.max_constancy(lane // 16, 16), gl.max_contiguous(lane % 16, 16)
    x_at = x_TD + (assignment // K).to(gl.int64) * (D // 4) + (row % 2 * 32)[:, None]
    x_at += (part * 64 + transposed_word(word))[None, :]
    of_gate = row // 8 * 8 + row % 8 // 4 * F + row % 4
    codes_at = codes_EGB + ((expert * 2 * F + column + of_gate) * (D // 32 * BITS))[:, None]
    codes_at += (part * 8 * BITS + word)[None, :]
    row = gl.arange(0, 8 * W, gl.SliceLayout(1, thin))
    at = expert * ((D + GROUP - 1) // GROUP) * 2 * F + column + row // 8 * 8 + row % 8 // 4 * F + row % 4

    STEPS: gl.constexpr = D // 256 // SPLIT
    ROUNDS: gl.constexpr = (STEPS + IN_FLIGHT - 1) // IN_FLIGHT
    PER_ROUND: gl.constexpr = (STEPS + ROUNDS - 1) // ROUNDS
    held: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    dots = gl.allocate_shared_memory(gl.float32, [STEPS, 4 * SPLIT, 16 * W], held)
    factors = gl.allocate_shared_memory(scales.dtype.element_ty, [STEPS, 4 * SPLIT, 16 * W], held)
    for number in gl.static_range(ROUNDS):
        hidden_round(
            x_at, codes_at, at, scales, zeros, dots, factors, F, thin, number * PER_ROUND,
            STEPS if number == ROUNDS - 1 else (number + 1) * PER_ROUND, D, GROUP, BITS, SPLIT,
        )  # fmt: skip
    barrier()
    flat: gl.constexpr = gl.BlockedLayout([4 * SPLIT, 1], [8 // W, 4 * W], [1, 4], [0, 1])
    total = None
    for step in gl.static_range(STEPS):
        total = in_order(total, dots.index(step).load(flat), factors.index(step).load(flat).to(gl.float32))

    kind: gl.constexpr = hidden_NF.dtype.element_ty
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [1, 1, 4], [2, 1, 0])
    both = total.to(kind).to(gl.float32).reshape([2 * W, 2, 4]).permute([0, 2, 1])
    gate, up = gl.convert_layout(both, pairs).split()
    hidden = (gate / (1.0 + gl.exp(-gate)) * up).reshape([8 * W])
    n = column + gl.arange(0, 8 * W, hidden.type.layout)
    out_at = hidden_NF + assignment.to(gl.int64) * F + n // 64 * 64 + transposed_word(n % 64 // 4) * 4 + n % 4
    gl.store(out_at, hidden.to(kind))


@gluon.jit
def halves(rows):
    first, second = rows.reshape([2, rows.shape[0] // 2, rows.shape[1]]).permute([1, 2, 0]).split()
    return first, second


@gluon.jit
def in_order(total, dots, weights):
    """Products (choices, columns), weighted and added one after the other; None is what nothing was added to yet."""
    if dots.shape[0] == 1:
        if total is None:
            total = gl.zeros_like(dots)
        total = gl.fma(dots, weights, total)
    else:
        first, second = halves(dots)
        weight, next_weight = halves(weights)
        total = in_order(in_order(total, first, weight), second, next_weight)
    return total


@gluon.jit
def combine(own, weights, out_at, flat: gl.constexpr, WARPS: gl.constexpr):
    """Eight columns of the output, from what each choice makes of them."""
    kind: gl.constexpr = out_at.dtype.element_ty
    whole: gl.constexpr = gl.BlockedLayout([1, 4 * WARPS], [8, 4], [WARPS, 1], [1, 0])
    rounded = gl.convert_layout(own.to(kind).to(gl.float32), whole)
    alike, _ = rounded.reshape([8, WARPS, 2, 2]).split()
    alike, _ = alike.split()
    out = in_order(None, gl.convert_layout(alike.permute([1, 0]), flat), weights).reshape([8])
    gl.store(out_at + gl.arange(0, 8, out.type.layout), out.to(kind))


@gluon.jit
def output_kernel(
    hidden_NF,
    routes_N,
    weights_N,
    codes_EDB,
    scales,
    zeros,
    out_TD,
    D,
    F: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
    GROUP: gl.constexpr,
    BITS: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Eight columns of one token's output, a warp for each of its choices."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([WARPS, 1], [4, 8], [1, WARPS], [0, 1])
    token = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * 8
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    lane = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, wide))
    # Warps beyond the choices do the last once more, and count nothing.
    choice, word = gl.max_constancy(gl.minimum(lane // 16, K - 1), 16), gl.max_contiguous(lane % 16, 16)
    expert = gl.maximum(gl.load(routes_N + token * K + choice), 0).to(gl.int64)
    row = gl.max_constancy(expert, 16)[None, :] * D + (column + g)[:, None]
    codes_at = codes_EDB + row * (F // 32 * BITS) + word[None, :]
    odd = (g % 2 * 32)[:, None]
    x_at = hidden_NF + (token * K + choice)[None, :] * (F // 4) + odd + word[None, :]
    place = gl.arange(0, 8, gl.SliceLayout(1, thin))
    own = gl.minimum(gl.arange(0, 4 * WARPS, gl.SliceLayout(0, thin)) // 4, K - 1)
    expert = gl.maximum(gl.load(routes_N + token * K + own), 0).to(gl.int64)
    at = (expert * ((F + GROUP - 1) // GROUP) * D)[None, :] + (column + place)[:, None]
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + at
    slot = gl.arange(0, WARPS, gl.SliceLayout(1, flat))
    weights = gl.load(weights_N + token * K + slot, mask=slot < K, other=0.0)[:, None].broadcast_to([WARPS, 8])
    total = summed(codes_at, x_at, odd, scales + at, zeros_at, D, thin, F, IN_FLIGHT, GROUP, BITS, PDL)

    kind: gl.constexpr = out_TD.dtype.element_ty
    whole: gl.constexpr = gl.BlockedLayout([1, 4 * WARPS], [8, 4], [WARPS, 1], [1, 0])
    rounded = gl.convert_layout(total.to(kind).to(gl.float32), whole)
    alike, _ = rounded.reshape([8, WARPS, 2, 2]).split()
    alike, _ = alike.split()
    out = in_order(None, gl.convert_layout(alike.permute([1, 0]), flat), weights).reshape([8])
    gl.store(out_TD + token * D + column + gl.arange(0, 8, out.type.layout), out.to(kind))
