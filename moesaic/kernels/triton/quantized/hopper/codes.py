"""Codes of 4 or 8 bits, from shared memory into the registers that `wgmma` reads its first operand from.

Of sixteen inputs of a row, thread t of four brings 2t, 2t + 1, 2t + 8 and 2t + 9, because the second operand lies in
shared memory in its order. A word of codes has inputs 4w to 4w + 3: thread t wants half of word t / 2 and half of word
2 + t / 2. Words lie as the columns of a square (`packed_weight.py`), so that word w of four times sixteen inputs are 16
bytes in a row: two loads bring a thread all that it needs of 64 bytes, and its neighbour makes use of the other half of
each word.
"""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _unpacking(bits: int) -> str:
    """Two bytes of a word, as the selector says, to integers in bf16 (`matmul_kernels.unpacked` says how). Of 4 bits
    those in the low bits and those in the high bits."""
    text = "{\n.reg .b32 middle, taken, a, b;\nmov.b32 middle, 0x43084308;\n"
    results = 2 if bits == 4 else 1
    for word in range(2):
        outputs = [f"${results * word + i}" for i in range(results)]
        text += f"prmt.b32 a, ${2 * results + 2 * word}, 0, ${2 * results + 4};\n"
        if bits == 8:
            text += "lop3.b32 taken, a, 0x00800080, 0x43004300, 0xae;\n"
            text += f"lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;\nsub.bf16x2 {outputs[0]}, a, taken;\n"
        else:
            text += "shr.u32 b, a, 4;\n"
            for name, output in zip("ab", outputs, strict=True):
                text += f"lop3.b32 {name}, {name}, 0x000f000f, 0x43004300, 0xea;\n"
                text += f"sub.bf16x2 {output}, {name}, middle;\n"
    return text + "}"


UNPACK_4, UNPACK_8 = (gl.constexpr(_unpacking(bits)) for bits in (4, 8))
OF_UNPACK_4, OF_UNPACK_8 = (gl.constexpr(",".join(["=&r"] * count + ["r"] * 6)) for count in (4, 2))


@gluon.constexpr_function
def tile_layout(pair):
    """64 rows of sixteen words, as they are read: two threads the same."""
    near, apart = ((8, 16), 32) if pair else ((16, 32), 8)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 8], [apart, 0]],
        lane_bases=[[0, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[near[0], 0], [near[1], 0]],
        block_bases=[],
        shape=[64, 16],
    )


@gluon.constexpr_function
def operand_layout():
    """64 rows, four times sixteen inputs, two words, two halves of a word, two bytes: the first operand of `wgmma`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [8, 0, 0, 0, 0]],
        lane_bases=[[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        block_bases=[],
        shape=[64, 4, 2, 2, 2],
    )


@gluon.jit
def selectors():
    """Which two bytes of a word a thread takes."""
    whole: gl.constexpr = operand_layout()
    of_half: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, whole))))
    half = gl.arange(0, 2, of_half)
    chosen = gl.where(half == 0, 0x4140, 0x4342)
    return chosen[None, None, None, :, None].broadcast_to([64, 4, 2, 2, 2])


@gluon.jit
def both(words):
    """[row, word, sixteen] for each half of a word and each of its two bytes."""
    whole: gl.constexpr = operand_layout()
    words = gl.convert_layout(
        words.permute([0, 2, 1]), gl.SliceLayout(3, gl.SliceLayout(4, whole)), assert_trivial=True
    )
    return words[:, :, :, None, None].broadcast_to([64, 4, 2, 2, 2])


@gluon.jit
def operand(first, second, mma: gl.constexpr):
    """From inputs 2t and 2t + 8 to the operand of 64 inputs."""
    square = gl.join(first, second).permute([0, 1, 5, 2, 3, 4]).reshape([64, 64])
    return gl.convert_layout(square, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def words_of(tile, PAIR: gl.constexpr):
    """Of 64 rows of sixteen words the first eight and the others. Of a pair, rows g and g + 8 of a warp are gate and up
    of the same column, which lie 32 rows from each other."""
    words = tile.load(tile_layout(PAIR))
    if PAIR:
        words = words.reshape([2, 4, 8, 16]).permute([1, 0, 2, 3]).reshape([64, 16])
    near, far = words.reshape([64, 2, 2, 4]).permute([0, 2, 3, 1]).split()
    return near, far


@gluon.jit
def operands(near, far, selector, mma: gl.constexpr, BITS: gl.constexpr):
    """Of 4 bits 64 inputs and the next 64; of 8 bits 64, twice the same."""
    if BITS == 4:
        low, high, far_low, far_high = gl.inline_asm_elementwise(
            UNPACK_4, OF_UNPACK_4, [both(near), both(far), selector],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return operand(low, far_low, mma), operand(high, far_high, mma)
    else:
        one, other = gl.inline_asm_elementwise(
            UNPACK_8, OF_UNPACK_8, [both(near), both(far), selector],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        made = operand(one, other, mma)
        return made, made


@gluon.jit
def ask(scales, zeros, rows, step, high, BITS: gl.constexpr, QUANTUM: gl.constexpr):
    """Scales and zeros of a block. Of 4 bits the 64 inputs in the high bits may have others."""
    scale = gl.load(scales + step + rows)
    scale_high = scale
    if BITS == 4 and QUANTUM % 128 != 0:
        scale_high = gl.load(scales + high + rows)
    zero, zero_high = scale, scale_high
    if zeros is not None:
        zero = gl.load(zeros + step + rows)
        zero_high = zero
        if BITS == 4 and QUANTUM % 128 != 0:
            zero_high = gl.load(zeros + high + rows)
    return scale, scale_high, zero, zero_high
