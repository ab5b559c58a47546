"""The kernels of matmuls with weights quantized to 4 or 8 bits (`packed_weight.py` says how they lie in memory).

The weights are the first operand of the tensor cores' matmuls, so that they go there from the registers they are
unpacked in. Each HALF inputs are summed by themselves, scaled, and added in order, whatever the tile: a token's bits
are the same alone and in any batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def unpacked(word: str, names: tuple[str, ...]) -> str:
    """Four bytes to integers in bf16, in assembly. To four names, those of 4 bits, -8 to 7: two pairs from the low
    bits, two from the high bits, each as the last bits of 128 to 143, from which 136 is taken. To two names, those of 8
    bits, -128 to 127: the last seven become those of 128 to 255, from which 128 or 256 is taken, as the first says."""
    text = f"prmt.b32 {names[0]}, {word}, 0, 0x4140;\nprmt.b32 {names[1]}, {word}, 0, 0x4342;\n"
    if len(names) == 2:
        for name in names:
            text += f"lop3.b32 taken, {name}, 0x00800080, 0x43004300, 0xae;\n"
            text += f"lop3.b32 {name}, {name}, 0x007f007f, 0x43004300, 0xea;\nsub.bf16x2 {name}, {name}, taken;\n"
        return text
    text += f"shr.u32 {names[2]}, {names[0]}, 4;\nshr.u32 {names[3]}, {names[1]}, 4;\n"
    for name in names:
        text += f"lop3.b32 {name}, {name}, 0x000f000f, 0x43004300, 0xea;\nsub.bf16x2 {name}, {name}, middle;\n"
    return text


def _unpacking(names: tuple[str, ...]) -> str:
    text = f"{{\n.reg .b32 middle, taken, {', '.join(names)};\nmov.b32 middle, 0x43084308;\n"
    return (
        text + unpacked(f"${len(names)}", names) + "".join(f"mov.b32 ${i}, {n};\n" for i, n in enumerate(names)) + "}"
    )


UNPACK, UNPACK_8 = tl.constexpr(_unpacking(("a", "b", "c", "d"))), tl.constexpr(_unpacking(("a", "b")))


@triton.jit
def in_their_order(bytes, HALF: tl.constexpr):
    """Of 64 bytes of codes, sixteen words lie as the columns of a square (`packed_weight.py` says why)."""
    if HALF == 64:
        square = bytes.reshape(bytes.shape[0], 4, 4, 4).permute(0, 2, 1, 3)
        bytes = square.reshape(bytes.shape[0], 64)
    return bytes


@triton.jit
def whole_bytes(bytes, kind: tl.constexpr, PACKED: tl.constexpr):
    """Codes of 8 bits, less their middle."""
    if PACKED:
        codes = tl.inline_asm_elementwise(UNPACK_8, "=r,=r,r", [bytes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        codes = (bytes.to(tl.int32) - 128).to(kind)
    return codes


@triton.jit
def both_halves(bytes, kind: tl.constexpr, PACKED: tl.constexpr):
    """The codes in the low and in the high bits of bytes, less their middle."""
    if PACKED:
        low, high = tl.inline_asm_elementwise(
            UNPACK, "=r,=r,=r,=r,r", [bytes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((bytes & 15).to(tl.int32) - 8).to(kind)
        high = ((bytes >> 4).to(tl.int32) - 8).to(kind)
    return low, high


@triton.jit
def steps(scales_at, zeros_at, kept, place, INPUTS, OUTPUTS, GROUP: tl.constexpr):
    """Scales and zeros of the group of an input; what fills up the last bytes may have none of its own."""
    at = tl.minimum(place, INPUTS - 1) // GROUP * OUTPUTS
    scale = tl.load(scales_at + at, mask=kept, other=0.0)
    zero = scale
    if zeros_at is not None:
        zero = tl.load(zeros_at + at, mask=kept, other=0.0)
    return scale, zero


@triton.jit
def add(total, codes, x, scale, zero, ZEROS: tl.constexpr, PRECISION: tl.constexpr):
    """What `HALF` inputs add to the sums."""
    dot = tl.dot(codes, x, input_precision=PRECISION)
    if ZEROS:
        ones = tl.full([16, codes.shape[1]], 1.0, codes.dtype)
        sum = tl.max(tl.dot(ones, x, input_precision=PRECISION), 0)  # its rows are alike
        dot = tl.fma(-zero.to(tl.float32)[:, None], sum[None, :], dot)
    # Said to be one rounding: the compiler might else round twice in one kernel and once in another.
    return tl.fma(dot, scale.to(tl.float32)[:, None], total)


@triton.jit
def summed(
    x_at,
    valid,
    codes_at,
    scales_at,
    zeros_at,
    kept,
    INPUTS,
    OUTPUTS,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    kind: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Products (rows of weights, lanes) of weights whose codes, scales and zeros begin at the given places with inputs
    that begin at `x_at`; scales of one group after the other are OUTPUTS apart."""
    j = tl.arange(0, HALF)
    x_at = x_at[None, :] + j[:, None]
    codes_at = codes_at[:, None] + j[None, :]
    total = tl.zeros([codes_at.shape[0], x_at.shape[1]], tl.float32)
    ZEROS: tl.constexpr = zeros_at is not None
    STEP: tl.constexpr = HALF * (8 // BITS)
    # Only what goes into matmuls is read ahead by the compiler: scales and zeros are asked for an iteration before.
    scale, zero = steps(scales_at, zeros_at, kept, 0, INPUTS, OUTPUTS, GROUP)
    scale_high, zero_high = scale, zero
    if GROUP % STEP != 0:
        scale_high, zero_high = steps(scales_at, zeros_at, kept, HALF, INPUTS, OUTPUTS, GROUP)
    for base in tl.range(0, INPUTS, STEP, num_stages=STAGES):
        next_scale, next_zero = steps(scales_at, zeros_at, kept, base + STEP, INPUTS, OUTPUTS, GROUP)
        bytes = in_their_order(tl.load(codes_at, mask=kept[:, None], other=0), HALF)
        low = tl.load(x_at, mask=valid[None, :] & (j[:, None] < INPUTS - base), other=0.0)
        if BITS == 8:
            codes = whole_bytes(bytes, kind, PACKED)
            total = add(total, codes, low, scale, zero, ZEROS, PRECISION)
        else:
            codes_low, codes_high = both_halves(bytes, kind, PACKED)
            high = tl.load(x_at + HALF, mask=valid[None, :] & (j[:, None] + HALF < INPUTS - base), other=0.0)
            total = add(total, codes_low, low, scale, zero, ZEROS, PRECISION)
            if GROUP % STEP != 0:
                total = add(total, codes_high, high, scale_high, zero_high, ZEROS, PRECISION)
                scale_high, zero_high = steps(
                    scales_at, zeros_at, kept, base + STEP + HALF, INPUTS, OUTPUTS, GROUP
                )  # fmt: skip
            else:
                total = add(total, codes_high, high, scale, zero, ZEROS, PRECISION)
        scale, zero = next_scale, next_zero
        x_at += STEP
        codes_at += HALF
    return total


@triton.jit
def rows_kernel(
    x_PI,
    codes_EOB,
    scales,
    zeros,
    bias_O,
    out_PO,
    tiles,
    totals,
    T,
    INPUTS,
    OUTPUTS,
    BM: tl.constexpr,
    BN: tl.constexpr,
    RECORD: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of rows times their matrix; without a table of tiles, all rows times the only one. Tiles of the same
    columns follow each other, so that their weights are read from memory once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    used = tl.cdiv(T, BM)
    if tiles is not None:
        used = tl.load(totals)
    if tile < used:
        row = tl.arange(0, BM).to(tl.int64)
        expert = tl.zeros([], tl.int64)
        if tiles is not None:
            record = tiles + tile * RECORD
            expert += tl.load(record)
            row += (tile - tl.load(record + 1)) * BM
            valid = row < tl.load(record + 4)
            row += tl.load(record + 3)
        else:
            row += tile * BM
            valid = row < T
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        kind: tl.constexpr = out_PO.dtype.element_ty
        first = expert * tl.cdiv(INPUTS, GROUP) * OUTPUTS + n
        zeros_at = zeros
        if zeros is not None:
            zeros_at = zeros + first
        total = summed(
            x_PI + row * INPUTS, valid, codes_EOB + (expert * OUTPUTS + n) * WIDTH, scales + first, zeros_at,
            n < OUTPUTS, INPUTS, OUTPUTS, GROUP, BITS, HALF, kind, PRECISION, STAGES, PACKED,
        )  # fmt: skip
        if bias_O is not None:
            total += tl.load(bias_O + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        out_at = out_PO + row[None, :] * OUTPUTS + n[:, None]
        tl.store(out_at, total.to(kind), mask=valid[None, :] & (n[:, None] < OUTPUTS))
