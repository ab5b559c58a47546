"""Experts of 4 bits for a few tokens: codes go from memory straight into the registers that tensor cores take them from.

No shared memory to go through, no other warps to wait for: a warp asks for all codes of its rows at once, and unpacks
what has come. In a product of tensor cores, thread (g, t) of a warp brings inputs of rows g and g + 8; which inputs
those are is of no account, as long as weights and x agree. So a thread reads 16 bytes in a row, 32 codes, and the 32
inputs that belong to them. Each 64 inputs are summed by themselves, scaled, and added in order, as in
`coded_kernels.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.coded import Coded
from moesaic.kernels.triton.overlap import launch_overlapped, overlaps

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

BLOCK = 128  # inputs whose codes lie in 64 bytes of a row: the first 64 in their low bits, the others in their high bits
MOST_UP, MOST_DOWN = 16, 12  # blocks of a row: all of them in registers
MOST_CHOICES = 8


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
        f"lop3.b32 {name}, {name}, 0x000f000f, 0x43004300, 0xea;\nsub.bf16x2 {name}, {name}, middle;\n" for name in names
    )


def _multiplied(sums: str, rows: tuple[str, str, str, str], x: int) -> str:
    """16 inputs of 16 rows: the first pairs of rows g and g + 8, then the second ones."""
    total = ", ".join(f"{sums}{i}" for i in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{total}}}, {{{', '.join(rows)}}}, "
        f"{{${x}, ${x + 1}}}, {{{total}}};\n"
    )


def _assembly(ones: bool) -> str:
    """A block's products. In: four words of codes of either row, then of x eight for the low bits and eight for the
    high. Out: row g's product with the low bits' inputs, with the high bits', and the same of row g + 8. With `ones`
    there are no codes: sums of the inputs. Columns of x may differ: row g meets the even ones, row g + 8 the odd."""
    first_x = 4 if ones else 12
    text = "{\n.reg .b32 middle, a<8>;\n.reg .f32 c<4>, d<4>;\nmov.b32 middle, 0x43084308;\n"
    text += "".join(f"mov.f32 {name}{i}, 0f00000000;\n" for name in "cd" for i in range(4))
    if ones:
        text += "".join(f"mov.b32 a{i}, 0x3f803f80;\n" for i in range(8))
    for j in range(4):
        if not ones:
            text += _unpacked(f"${4 + j}", ("a0", "a2", "a4", "a6")) + _unpacked(f"${8 + j}", ("a1", "a3", "a5", "a7"))
        text += _multiplied("c", ("a0", "a1", "a2", "a3"), first_x + 2 * j)
        text += _multiplied("d", ("a4", "a5", "a6", "a7"), first_x + 8 + 2 * j)
    return text + "".join(f"mov.f32 ${i}, {name};\n" for i, name in enumerate(("c0", "d0", "c3", "d3"))) + "}"


PRODUCTS, SUMS = gl.constexpr(_assembly(False)), gl.constexpr(_assembly(True))
OF_PRODUCTS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 24))
OF_SUMS = gl.constexpr(",".join(["=r"] * 4 + ["r"] * 16))


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
def codes_of(at, further, STEPS: gl.constexpr, PARTS: gl.constexpr):
    """Of rows g, and of rows g + 8, which begin `further` on."""
    codes = ()
    for step in gl.static_range(STEPS):
        here = at + step * 16 * PARTS
        codes = codes + (gl.load(here), gl.load(here + further))
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
            found = found + (low, high)
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
    codes,
    x_at,
    scales,
    next_scales,
    zeros,
    next_zeros,
    thin: gl.constexpr,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The products of rows g with x; and of rows g + 8, where those are other rows."""
    total = gl.zeros([8, 4 * WARPS], gl.float32, thin)
    other = total
    for step in gl.static_range(STEPS):
        at = x_at + step * 64 * PARTS
        x0, x1, x2, x3 = gl.load(at), gl.load(at + 4), gl.load(at + 32), gl.load(at + 36)
        both = gl.inline_asm_elementwise(
            PRODUCTS, OF_PRODUCTS, [codes[2 * step], codes[2 * step + 1], x0, x1, x2, x3],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        low, high, next_low, next_high = apart(both, thin, WARPS)
        sum_low, sum_high, next_sum_low, next_sum_high = low, high, next_low, next_high
        if zeros is not None:
            both = gl.inline_asm_elementwise(SUMS, OF_SUMS, [x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=4)
            sum_low, sum_high, next_sum_low, next_sum_high = apart(both, thin, WARPS)
        total = added(total, low, high, scales, zeros, sum_low, sum_high, step)
        if PARTS == 1:
            other = added(other, next_low, next_high, next_scales, next_zeros, next_sum_low, next_sum_high, step)
        else:
            total = added(total, next_low, next_high, next_scales, next_zeros, next_sum_low, next_sum_high, step)
    return total, other


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
    OVERLAP: gl.constexpr,
):
    """Four columns of one assignment's hidden row, by one warp: rows g are four of gate and four of up with every other
    block, rows g + 8 the same with the others."""
    if OVERLAP:
        # In this order: the kernel after this one reads the routes before it waits.
        gdc_wait()
        gdc_launch_dependents()
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    STEPS: gl.constexpr = D // 256
    assignment = gl.program_id(0)
    column = gl.program_id(1) * 4
    expert = gl.maximum(gl.load(routes_N + assignment), 0).to(gl.int64)  # -1: a row that is no token
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    word = gl.arange(0, 16, gl.SliceLayout(0, wide))
    row = expert * 2 * F + g // 4 * F + column + g % 4
    codes = codes_of(codes_EGB + (row * (D // 8))[:, None] + word[None, :], 16, STEPS, 2)
    place = gl.arange(0, 8, gl.SliceLayout(1, thin))
    same = 0 * gl.arange(0, 4, gl.SliceLayout(0, thin))
    at = expert * (D // GROUP) * 2 * F + (place // 4 * F + column + place % 4)[:, None] + same[None, :]
    zeros_at = zeros
    if zeros is not None:
        zeros_at = zeros + at
    own_scales = steps_of(scales + at, 0, 2 * F, STEPS, 2, GROUP)
    next_scales = steps_of(scales + at, 1, 2 * F, STEPS, 2, GROUP)
    own_zeros = steps_of(zeros_at, 0, 2 * F, STEPS, 2, GROUP)
    next_zeros = steps_of(zeros_at, 1, 2 * F, STEPS, 2, GROUP)
    barrier()  # else the compiler asks for codes when they are needed
    x_word = word + word // 4 * 4
    x_at = x_TD + (assignment // K).to(gl.int64) * (D // 2) + x_word[None, :] + (g % 2 * 64)[:, None]
    total, _ = summed(codes, x_at, own_scales, next_scales, own_zeros, next_zeros, thin, STEPS, 2, 1)
    kind: gl.constexpr = hidden_NF.dtype.element_ty
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 4, 2], [1, 1, 1], [2, 1, 0])
    both = gl.convert_layout(total.to(kind).to(gl.float32).reshape([2, 4, 4]).permute([1, 2, 0]), pairs)
    gate, up = both.split()
    hidden = gate / (1.0 + gl.exp(-gate)) * up
    four: gl.constexpr = hidden.type.layout
    n = column + gl.arange(0, 4, gl.SliceLayout(1, four))
    alike = gl.arange(0, 4, gl.SliceLayout(0, four))
    out_at = hidden_NF + assignment.to(gl.int64) * F + n[:, None] + 0 * alike[None, :]
    gl.store(out_at, hidden.to(kind), mask=(alike == 0)[None, :] & (n >= 0)[:, None])


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
    OVERLAP: gl.constexpr,
):
    """A few columns of one token's output, a warp for each of its choices. With two parts, rows g + 8 are the same eight
    columns with every other block; with one, the next eight columns."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([WARPS, 1], [4, 8], [1, WARPS], [0, 1])
    STEPS: gl.constexpr = F // 128 // PARTS
    token = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * (16 // PARTS)
    g = gl.arange(0, 8, gl.SliceLayout(1, wide))
    lane = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, wide))
    # Warps beyond the choices do the last once more, and count nothing.
    choice, word = gl.max_constancy(gl.minimum(lane // 16, K - 1), 16), gl.max_contiguous(lane % 16, 16)
    expert = gl.maximum(gl.load(routes_N + token * K + choice), 0).to(gl.int64)
    row = gl.max_constancy(expert, 16)[None, :] * D + (column + g)[:, None]
    further = 8 * (F // 8) if PARTS == 1 else 16
    codes = codes_of(codes_EDB + row * (F // 8) + word[None, :], further, STEPS, PARTS)
    place = gl.arange(0, 8, gl.SliceLayout(1, thin))
    own = gl.minimum(gl.arange(0, 4 * WARPS, gl.SliceLayout(0, thin)) // 4, K - 1)
    expert = gl.maximum(gl.load(routes_N + token * K + own), 0).to(gl.int64)
    at = (expert * (F // GROUP) * D)[None, :] + (column + place)[:, None]
    next_at = at + 8 if PARTS == 1 else at
    zeros_at, next_zeros_at = zeros, zeros
    if zeros is not None:
        zeros_at, next_zeros_at = zeros + at, zeros + next_at
    own_scales = steps_of(scales + at, 0, D, STEPS, PARTS, GROUP)
    next_scales = steps_of(scales + next_at, PARTS - 1, D, STEPS, PARTS, GROUP)
    own_zeros = steps_of(zeros_at, 0, D, STEPS, PARTS, GROUP)
    next_zeros = steps_of(next_zeros_at, PARTS - 1, D, STEPS, PARTS, GROUP)
    slot = gl.arange(0, WARPS, gl.SliceLayout(1, flat))
    weights = gl.load(weights_N + token * K + slot, mask=slot < K, other=0.0)[:, None].broadcast_to([WARPS, 8])
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x_word = choice * (F // 2) + word + lane // 4 % 4 * 4
    x_at = hidden_NF + token * K * (F // 2) + x_word[None, :] + (g % PARTS * 64)[:, None]
    total, other = summed(codes, x_at, own_scales, next_scales, own_zeros, next_zeros, thin, STEPS, PARTS, WARPS)
    out_at = out_TD + token * D + column
    combine(total, weights, out_at, flat, WARPS)
    if PARTS == 1:
        combine(other, weights, out_at + 8, flat, WARPS)


def takes(x_TD: torch.Tensor, choices: int, gate_up: Coded, down: Coded) -> bool:
    """Where it is ahead on an H200: with more inputs, not all codes of a row find room at once."""
    D, F = x_TD.shape[1], down.inputs
    coded = all(weight.bits == 4 and weight.apart == 64 for weight in (gate_up, down))
    fits = D % (2 * BLOCK) == 0 and D <= MOST_UP * BLOCK and F % BLOCK == 0 and F <= MOST_DOWN * BLOCK
    return coded and fits and choices <= MOST_CHOICES and x_TD.dtype == torch.bfloat16 and overlaps(x_TD.device)


def experts(
    x_TD: torch.Tensor, routes_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up: Coded, down: Coded
) -> torch.Tensor:
    (T, D), K, F = x_TD.shape, routes_TK.shape[1], down.inputs
    hidden_NF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    launch_overlapped(
        hidden_kernel,
        (T * K, F // 4),
        x_TD.view(torch.int32),
        routes_TK,
        gate_up.codes_EOB.view(torch.int32),
        gate_up.scales_EGO,
        gate_up.zeros_EGO,
        hidden_NF,
        F,
        D=D,
        K=K,
        GROUP=gate_up.group,
        num_warps=1,
        OVERLAP=overlaps(x_TD.device),
    )
    parts = 2 if F % (2 * BLOCK) == 0 else 1
    slots = triton.next_power_of_2(K)
    launch_overlapped(
        output_kernel,
        (T, D * parts // 16),
        hidden_NF.view(torch.int32),
        routes_TK,
        weights_TK,
        down.codes_EOB.view(torch.int32),
        down.scales_EGO,
        down.zeros_EGO,
        out_TD,
        D,
        F=F,
        K=K,
        WARPS=slots,
        GROUP=down.group,
        PARTS=parts,
        num_warps=slots,
        OVERLAP=overlaps(x_TD.device),
    )
    return out_TD
