"""The copying side of matmuls with quantized weights: codes and rows of x into shared memory ahead of their use."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moesaic.kernels.triton.experts.hopper.copies import known, settle, tensor_load

TALL = gl.constexpr(128)  # rows of x in a tile

# Two dozen arguments read better in rows than in columns.
# fmt: off


@gluon.jit
def look(tile, total, table, tiles_n, ROWS, RECORD: gl.constexpr):
    """The record of a tile (`experts.hopper.copies.look` says why ahead of its use): expert, its first tile, its tiles,
    its first row, its rows; of no tiles, zeros. Without a table there is one matrix for all rows."""
    tile = gl.maximum(gl.minimum(tile, total - 1), 0)
    if table is None:
        return tile * 0, tile * 0, (ROWS + TALL - 1) // TALL, tile * 0, ROWS
    else:
        lane = gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=True, pack=1)
        record = table + lane * (total >> 31) + tile // tiles_n * RECORD
        some = total > 0
        return (
            gl.load(record, mask=some, other=0), gl.load(record + 1, mask=some, other=0),
            gl.load(record + 2, mask=some, other=0), gl.load(record + 3, mask=some, other=0),
            gl.load(record + 4, mask=some, other=0),
        )


@gluon.jit
def recall(record):
    return known(record[0]), known(record[1]), known(record[2]), known(record[3]), known(record[4])


@gluon.jit
def fill_codes(codes_map, codes, expert, n, k, OUTPUTS, width, arrived, PAIR: gl.constexpr):
    """128 rows of sixteen words; of a pair, 32 rows of gate, 32 of up, and the same of the next columns."""
    if PAIR:
        row = expert * OUTPUTS + gl.minimum(n * 64, width - 64)
        for part in gl.static_range(4):
            at = row + part // 2 * 32 + part % 2 * width
            tensor_load(codes_map, [at, k * 16], arrived, codes.slice(part * 32, 32))
    else:
        row = expert * OUTPUTS + gl.minimum(n * 128, width - 128)
        for part in gl.static_range(2):
            tensor_load(codes_map, [row + part * 64, k * 16], arrived, codes.slice(part * 64, 64))


@gluon.jit
def fill(
    codes_map, x_map, sums_map, table, total, tiles_n, ROWS, stride, steps, OUTPUTS, width, codes, x, sums, ready,
    empty, PAIR: gl.constexpr, BITS: gl.constexpr, NEAR: gl.constexpr, STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """One warp, whole tiles: 64 inputs of 64 rows, and of the next 64 where there are so many; with zeros, the sums of
    these inputs."""
    EXTRA: gl.constexpr = 0 if sums_map is None else TALL * 4
    PER: gl.constexpr = 8 // BITS
    CODES: gl.constexpr = 128 * 64
    iteration = 0
    hop = gl.num_programs(0)
    record = look(gl.program_id(0), total, table, tiles_n, ROWS, RECORD)
    for tile in range(gl.program_id(0), total, hop):
        expert, first, span, start, count = recall(record)
        record = look(tile + hop, total, table, tiles_n, ROWS, RECORD)
        m, n = settle(tile, first, span, tiles_n, NEAR)
        row = m * TALL
        wide = row + 64 < count
        for block in range(steps // PER):
            for part in gl.static_range(PER):
                k = block * PER + part
                stage = iteration % STAGES
                mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                arrived = ready.index(stage)
                mbarrier.expect(arrived, 2 * 64 * 64 * 2 + EXTRA + (CODES if part == 0 else 0), pred=wide)
                mbarrier.expect(arrived, 64 * 64 * 2 + EXTRA + (CODES if part == 0 else 0), pred=wide == 0)
                if part == 0:
                    fill_codes(codes_map, codes.index(stage // PER), expert, n, block, OUTPUTS, width, arrived, PAIR)
                to = x.index(stage)
                tensor_load(x_map, [start + row, k * 64], arrived, to.slice(0, 64))
                tensor_load(x_map, [start + row + 64, k * 64], arrived, to.slice(64, 64), pred=wide)
                if sums_map is not None:
                    tensor_load(sums_map, [k * stride + start + row], arrived, sums.index(stage))
                iteration += 1
    # Codes are read a block ahead: once more than they are wanted.
    stage = iteration % STAGES
    mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), CODES)
    fill_codes(codes_map, codes.index(stage // PER), 0, 0, 0, OUTPUTS, width, ready.index(stage), PAIR)
