"""The kernels of `coded_direct.py`: codes go from memory straight into the registers tensor cores take them from.

No shared memory to go through, no other warps to wait for: a warp asks for all codes of its rows at once, and unpacks
what has come. In a product of tensor cores, thread (g, t) of a warp brings four of sixteen inputs of rows g and g + 8;
which four is of no account, as long as weights and x agree: those of one word of codes. It has read four words in a
row, and words lie so that they belong to four products (`coded.py`).

Sixteen inputs in a row make a product, four products follow each other, and what these 64 inputs make is scaled and
added in order. So does `coded_kernels.py`, with as many tokens as there are: a token's bits are the same there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6


def _unpacked(word: str, names: tuple[str, str, str, str]) -> str:
    """Four bytes to integers from -8 to 7 in bf16: two pairs from the low bits, two from the high bits."""
    low, next_low, high, next_high = names
    spread = f"""
prmt.b32 {low}, {word}, 0, 0x4140;
prmt.b32 {next_low}, {word}, 0, 0x4342;
shr.u32 {high}, {low}, 4;
shr.u32 {next_high}, {next_low}, 4;
"""
    return spread + "".join(
        f"lop3.b32 {name}, {name}, 0x000f000f, 0x43004300, 0xea;\nsub.bf16x2 {name}, {name}, middle;\n"
        for name in names
    )


def _multiplied(sums: str, rows: tuple[str, str, str, str], x: str) -> str:
    """16 inputs of 16 rows: the first pairs of rows g and g + 8, then the second ones."""
    total = ", ".join(f"{sums}{i}" for i in range(4))
    return (
        f"mov.b64 {{x0, x1}}, {x};\nmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{total}}}, "
        f"{{{', '.join(rows)}}}, {{x0, x1}}, {{{total}}};\n"
    )


def _assembly(ones: bool) -> str:
    """A block's products. In: four words of codes of either row, then of x four for the low bits and four for the
    high. Out: row g's product with the low bits' inputs, with the high bits', and the same of row g + 8. With `ones`
    there are no codes: sums of the inputs. Columns of x may differ: row g meets the even ones, row g + 8 the odd."""
    first_x = 4 if ones else 12
    text = "{\n.reg .b32 middle, x0, x1, a<8>;\n.reg .f32 c<4>, d<4>;\nmov.b32 middle, 0x43084308;\n"
    text += "".join(f"mov.f32 {name}{i}, 0f00000000;\n" for name in "cd" for i in range(4))
    if ones:
        text += "".join(f"mov.b32 a{i}, 0x3f803f80;\n" for i in range(8))
    for j in range(4):
        if not ones:
            text += _unpacked(f"${4 + j}", ("a0", "a2", "a4", "a6")) + _unpacked(f"${8 + j}", ("a1", "a3", "a5", "a7"))
        text += _multiplied("c", ("a0", "a1", "a2", "a3"), f"${first_x + j}")
        text += _multiplied("d", ("a4", "a5", "a6", "a7"), f"${first_x + 4 + j}")
    return text + "".join(f"mov.f32 ${i}, {name};\n" for i, name in enumerate(("c0", "d0", "c3", "d3"))) + "}"


PRODUCTS, SUMS = gl.constexpr(_assembly(False)), gl.constexpr(_assembly(True))
OF_PRODUCTS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 8 + ["l"] * 8))
OF_SUMS = gl.constexpr(",".join(["=r"] * 4 + ["l"] * 8))


@gluon.jit
def apart(both, thin: gl.constexpr, WARPS: gl.constexpr):
    """Row g with the low bits' inputs, with the high bits', and row g + 8 with either."""
    low, high = both.reshape([8, 4 * WARPS, 2, 2]).split()
    first_low, second_low = low.split()
    first_high, second_high = high.split()
    return (
        gl.convert_layout(first_low, thin, assert_trivial=True),
        gl.convert_layout(first_high, thin, assert_trivial=True),
        gl.convert_layout(second_low, thin, assert_trivial=True),
        gl.convert_layout(second_high, thin, assert_trivial=True),
    )


@gluon.jit
def turned(word):
    """Which four of 64 inputs a word of codes belongs to, and the other way round."""
    return word % 4 * 4 + word // 4


@gluon.jit
def codes_of(at, further, STEPS: gl.constexpr, PARTS: gl.constexpr):
    """Of rows g, and of rows g + 8, which begin `further` on."""
    codes = ()
    for step in gl.static_range(STEPS):
        here = at + step * 16 * PARTS
        codes = codes + (gl.load(here), gl.load(here + further))  # type: ignore[assignment]
    return codes


@gluon.jit
def steps_of(at, first: gl.constexpr, OUTPUTS, STEPS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """Scales or zeros of each 64 inputs of every block, or of every other, from block `first` on. May be none."""
    found = None
    if at is not None:
        found = ()
        for step in gl.static_range(STEPS):
            place = (first + step * PARTS) * 128
            low = gl.load(at + place // GROUP * OUTPUTS)
            high = low
            if GROUP % 128 != 0:
                high = gl.load(at + (place + 64) // GROUP * OUTPUTS)
            found = found + (low, high)  # type: ignore[assignment]
    return found


@gluon.jit
def added(total, low, high, scales, zeros, sum_low, sum_high, step: gl.constexpr):
    if zeros is not None:
        low = gl.fma(-zeros[2 * step].to(gl.float32), sum_low, low)
        high = gl.fma(-zeros[2 * step + 1].to(gl.float32), sum_high, high)
    total = gl.fma(low, scales[2 * step].to(gl.float32), total)
    return gl.fma(high, scales[2 * step + 1].to(gl.float32), total)


@gluon.jit
def summed(
    codes_at,
    further,
    x_at,
    scales_at,
    next_scales_at,
    zeros_at,
    next_zeros_at,
    OUTPUTS,
    thin: gl.constexpr,
    INPUTS: gl.constexpr,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    GROUP: gl.constexpr,
    WAITS: gl.constexpr,
):
    """The products of rows g with x, and of rows g + 8: with two parts those are the same, with every other block.

    With WAITS, x is there only after the launch before this one; the first codes are asked for before that."""
    total = gl.zeros([8, 4 * WARPS], gl.float32, thin)
    other = total
    TURN: gl.constexpr = STEPS * PARTS
    for turn in gl.static_range(INPUTS // 128 // TURN):
        codes = codes_of(codes_at + turn * TURN * 16, further, STEPS, PARTS)
        scales = steps_of(scales_at, turn * TURN, OUTPUTS, STEPS, PARTS, GROUP)
        next_scales = steps_of(next_scales_at, turn * TURN + PARTS - 1, OUTPUTS, STEPS, PARTS, GROUP)
        zeros = steps_of(zeros_at, turn * TURN, OUTPUTS, STEPS, PARTS, GROUP)
        next_zeros = steps_of(next_zeros_at, turn * TURN + PARTS - 1, OUTPUTS, STEPS, PARTS, GROUP)
        if turn == 0 and WAITS:
            gdc_launch_dependents()
            gdc_wait()
        else:
            barrier()  # else the compiler asks for codes when they are needed
        for step in gl.static_range(STEPS):
            at = x_at + (turn * TURN + step * PARTS) * 32
            x_low, x_high = gl.load(at), gl.load(at + 16)
            both = gl.inline_asm_elementwise(
                PRODUCTS, OF_PRODUCTS, [codes[2 * step], codes[2 * step + 1], x_low, x_high],
                dtype=gl.float32, is_pure=True, pack=4,
            )  # fmt: skip
            low, high, next_low, next_high = apart(both, thin, WARPS)
            sum_low, sum_high, next_sum_low, next_sum_high = low, high, next_low, next_high
            if zeros is not None:
                both = gl.inline_asm_elementwise(SUMS, OF_SUMS, [x_low, x_high], dtype=gl.float32, is_pure=True, pack=4)
                sum_low, sum_high, next_sum_low, next_sum_high = apart(both, thin, WARPS)
            total = added(total, low, high, scales, zeros, sum_low, sum_high, step)
            if PARTS == 1:
                other = added(other, next_low, next_high, next_scales, next_zeros, next_sum_low, next_sum_high, step)
            else:
                total = added(total, next_low, next_high, next_scales, next_zeros, next_sum_low, next_sum_high, step)
    return total, other


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
    STEPS: gl.constexpr,
    TOKENS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Eight columns of four rows' products, by one warp: even columns of x are the rows with every other block, odd
    ones the same rows with the others, and what comes of them is in thread t for row t."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    column, first = gl.program_id(0) * 8, gl.program_id(1) * TOKENS
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    word = gl.arange(0, 16, gl.SliceLayout(0, wide))
    codes_at = codes_OB + ((column + g) * (INPUTS // 8))[:, None] + word[None, :]
    token = gl.minimum(first + g // 2, T - 1).to(gl.int64)
    x_at = x_TI + (token * (INPUTS // 4) + g % 2 * 32)[:, None] + turned(word)[None, :]
    n = column + gl.arange(0, 8, gl.SliceLayout(1, thin))
    row = first + gl.arange(0, 4, gl.SliceLayout(0, thin))
    at = n[:, None] + 0 * row[None, :]
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + at
    total, _ = summed(
        codes_at, 16, x_at, scales + at, scales + at, zeros_at, zeros_at, OUTPUTS,
        thin, INPUTS, STEPS, 2, 1, GROUP, OVERLAP,
    )  # fmt: skip
    if bias_O is not None:
        total += gl.load(bias_O + at).to(gl.float32)
    out_at = out_TO + row.to(gl.int64)[None, :] * OUTPUTS + n[:, None]
    gl.store(out_at, total.to(out_TO.dtype.element_ty), mask=(row < T)[None, :].broadcast_to([8, 4]))


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
    STEPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Four columns of one assignment's hidden row, by one warp: rows g are four of gate and four of up with every other
    block, rows g + 8 the same with the others. Columns of the hidden row lie as codes do."""
    if OVERLAP:
        # In this order: the kernel after this one reads the routes before it waits.
        gdc_wait()
        gdc_launch_dependents()
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    assignment = gl.program_id(0)
    column = gl.program_id(1) * 4
    expert = gl.maximum(gl.load(routes_N + assignment), 0).to(gl.int64)  # -1: a row that is no token
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    word = gl.arange(0, 16, gl.SliceLayout(0, wide))
    row = expert * 2 * F + g // 4 * F + column + g % 4
    codes_at = codes_EGB + (row * (D // 8))[:, None] + word[None, :]
    x_at = x_TD + (assignment // K).to(gl.int64) * (D // 4) + (g % 2 * 32)[:, None] + turned(word)[None, :]
    place = gl.arange(0, 8, gl.SliceLayout(1, thin))
    same = 0 * gl.arange(0, 4, gl.SliceLayout(0, thin))
    at = expert * ((D + GROUP - 1) // GROUP) * 2 * F + (place // 4 * F + column + place % 4)[:, None] + same[None, :]
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + at
    total, _ = summed(
        codes_at, 16, x_at, scales + at, scales + at, zeros_at, zeros_at, 2 * F, thin, D, STEPS, 2, 1, GROUP, False
    )
    kind: gl.constexpr = hidden_NF.dtype.element_ty
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 4, 2], [1, 1, 1], [2, 1, 0])
    both = gl.convert_layout(total.to(kind).to(gl.float32).reshape([2, 4, 4]).permute([1, 2, 0]), pairs)
    gate, up = both.split()
    hidden = gate / (1.0 + gl.exp(-gate)) * up
    four: gl.constexpr = hidden.type.layout
    n = column // 64 * 64 + turned(column % 64 // 4) * 4 + gl.arange(0, 4, gl.SliceLayout(1, four))
    alike = gl.arange(0, 4, gl.SliceLayout(0, four))
    out_at = hidden_NF + assignment.to(gl.int64) * F + n[:, None] + 0 * alike[None, :]
    gl.store(out_at, hidden.to(kind), mask=(alike == 0)[None, :].broadcast_to([4, 4]))


@gluon.jit
def halves(rows):
    first, second = rows.reshape([2, rows.shape[0] // 2, rows.shape[1]]).permute([1, 2, 0]).split()
    return first, second


@gluon.jit
def in_order(total, products, weights):
    """Products (choices, columns), weighted and added one after the other; None is what nothing was added to yet."""
    if products.shape[0] == 1:
        if total is None:
            total = gl.zeros_like(products)
        total = gl.fma(products, weights, total)
    else:
        first, second = halves(products)
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
    PARTS: gl.constexpr,
    STEPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A few columns of one token's output, a warp for each of its choices. With two parts, rows g + 8 are the same
    eight columns with every other block; with one, the next eight columns."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([WARPS, 1], [4, 8], [1, WARPS], [0, 1])
    token = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * (16 // PARTS)
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    lane = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, wide))
    # Warps beyond the choices do the last once more, and count nothing.
    choice, word = gl.max_constancy(gl.minimum(lane // 16, K - 1), 16), gl.max_contiguous(lane % 16, 16)
    expert = gl.maximum(gl.load(routes_N + token * K + choice), 0).to(gl.int64)
    row = gl.max_constancy(expert, 16)[None, :] * D + (column + g)[:, None]
    codes_at = codes_EDB + row * (F // 8) + word[None, :]
    further = F if PARTS == 1 else 16
    x_at = hidden_NF + (token * K + choice)[None, :] * (F // 4) + (g % PARTS * 32)[:, None] + word[None, :]
    place = gl.arange(0, 8, gl.SliceLayout(1, thin))
    own = gl.minimum(gl.arange(0, 4 * WARPS, gl.SliceLayout(0, thin)) // 4, K - 1)
    expert = gl.maximum(gl.load(routes_N + token * K + own), 0).to(gl.int64)
    at = (expert * ((F + GROUP - 1) // GROUP) * D)[None, :] + (column + place)[:, None]
    next_at = at + 8 if PARTS == 1 else at
    zeros_at, next_zeros_at = zeros, zeros
    if zeros is not None:
        zeros_at, next_zeros_at = zeros + at, zeros + next_at
    slot = gl.arange(0, WARPS, gl.SliceLayout(1, flat))
    weights = gl.load(weights_N + token * K + slot, mask=slot < K, other=0.0)[:, None].broadcast_to([WARPS, 8])
    total, other = summed(
        codes_at, further, x_at, scales + at, scales + next_at, zeros_at, next_zeros_at, D,
        thin, F, STEPS, PARTS, WARPS, GROUP, OVERLAP,
    )  # fmt: skip
    out_at = out_TD + token * D + column
    combine(total, weights, out_at, flat, WARPS)
    if PARTS == 1:
        combine(other, weights, out_at + 8, flat, WARPS)
