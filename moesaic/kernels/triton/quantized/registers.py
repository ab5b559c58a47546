"""Codes of 4 or 8 bits, straight from memory into the registers that tensor cores read, and their dot products with x.

In a matmul of tensor cores, thread (g, t) of a warp brings four of sixteen inputs of rows g and g + 8; which four is
of no account, as long as weights and x agree: those of one word of codes. It has read four words in a row, and words
lie so that they belong to four matmuls (`packed_weight.py`).
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moesaic.kernels.triton.quantized.matmul_kernels import unpacked


def _mma(sums: str, rows: tuple[str, str, str, str], x: str) -> str:
    """16 inputs of 16 rows: the first pairs of rows g and g + 8, then the second ones."""
    total = ", ".join(f"{sums}{i}" for i in range(4))
    return (
        f"mov.b64 {{x0, x1}}, {x};\nmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{total}}}, "
        f"{{{', '.join(rows)}}}, {{x0, x1}}, {{{total}}};\n"
    )


def _assembly(bits: int) -> str:
    """A block's dot products. In: the words of codes of row g, then of row g + 8, and of x four for the first 64 inputs
    and four for the others. Of 4 bits, those are in the low and in the high bits of the same words. Out: row g's dot
    product with the first inputs, with the others, and the same of row g + 8. With no bits there are no codes: sums of
    the inputs. Columns of x may differ: row g meets the even ones, row g + 8 the odd."""
    first_x = 4 + 2 * bits
    text = "{\n.reg .b32 middle, taken, x0, x1, a<8>;\n.reg .f32 c<4>, d<4>;\nmov.b32 middle, 0x43084308;\n"
    text += "".join(f"mov.f32 {name}{i}, 0f00000000;\n" for name in "cd" for i in range(4))
    if not bits:
        text += "".join(f"mov.b32 a{i}, 0x3f803f80;\n" for i in range(8))
    for j in range(4):
        if bits == 4:
            text += unpacked(f"${4 + j}", ("a0", "a2", "a4", "a6")) + unpacked(f"${8 + j}", ("a1", "a3", "a5", "a7"))
        if bits == 8:
            for word, first in ((4, 0), (8, 4), (12, 1), (16, 5)):
                text += unpacked(f"${word + j}", (f"a{first}", f"a{first + 2}"))
        text += _mma("c", ("a0", "a1", "a2", "a3"), f"${first_x + j}")
        text += _mma("d", ("a4", "a5", "a6", "a7"), f"${first_x + 4 + j}")
    return text + "".join(f"mov.f32 ${i}, {name};\n" for i, name in enumerate(("c0", "d0", "c3", "d3"))) + "}"


def _operands(bits: int) -> str:
    return ",".join(["=r"] * 4 + ["r"] * 2 * bits + ["l"] * 8)


DOTS_4, DOTS_8, SUMS = (gl.constexpr(_assembly(bits)) for bits in (4, 8, 0))
OF_DOTS_4, OF_DOTS_8, OF_SUMS = (gl.constexpr(_operands(bits)) for bits in (4, 8, 0))


@gluon.jit
def dots_of(codes, FIRST: gl.constexpr, x_low, x_high, thin: gl.constexpr, BITS: gl.constexpr):
    """A pair of blocks, from `FIRST` on in what was read."""
    if BITS == 4:
        both = gl.inline_asm_elementwise(
            DOTS_4, OF_DOTS_4, [codes[FIRST], codes[FIRST + 1], x_low, x_high],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        both = gl.inline_asm_elementwise(
            DOTS_8,
            OF_DOTS_8,
            [codes[2 * FIRST], codes[2 * FIRST + 1], codes[2 * FIRST + 2], codes[2 * FIRST + 3], x_low, x_high],
            dtype=gl.float32,
            is_pure=True,
            pack=4,
        )
    return apart(both, thin)


@gluon.jit
def sums_of(x_low, x_high, thin: gl.constexpr):
    both = gl.inline_asm_elementwise(SUMS, OF_SUMS, [x_low, x_high], dtype=gl.float32, is_pure=True, pack=4)
    return apart(both, thin)


@gluon.jit
def apart(both, thin: gl.constexpr):
    """Row g with the low bits' inputs, with the high bits', and row g + 8 with either: in order, a pair of blocks."""
    low, high = both.reshape([both.shape[0], both.shape[1] // 4, 2, 2]).split()
    first_low, second_low = low.split()
    first_high, second_high = high.split()
    return (
        gl.convert_layout(first_low, thin, assert_trivial=True),
        gl.convert_layout(first_high, thin, assert_trivial=True),
        gl.convert_layout(second_low, thin, assert_trivial=True),
        gl.convert_layout(second_high, thin, assert_trivial=True),
    )


@gluon.jit
def transposed_word(word):
    """Which four of 64 inputs a word of codes belongs to, and the other way round."""
    return word % 4 * 4 + word // 4


@gluon.jit
def block_of(at, BITS: gl.constexpr):
    codes = (gl.load(at),)
    if BITS == 8:
        codes = codes + (gl.load(at + 16),)
    return codes


@gluon.jit
def codes_of(at, FIRST: gl.constexpr, LAST: gl.constexpr, BITS: gl.constexpr):
    """Of pairs of blocks. Where the last block has no other, it is taken twice."""
    codes = ()
    for block in gl.static_range(FIRST, LAST):
        codes = codes + block_of(at + block * 4 * BITS, BITS)
    if (LAST - FIRST) % 2 != 0:
        codes = codes + block_of(at + (LAST - 1) * 4 * BITS, BITS)
    return codes
