"""One persistent kernel for matmuls of many rows with quantized weights on Hopper; `matmul.py` says what it does."""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moesaic.kernels.triton.experts.hopper.copies import settle
from moesaic.kernels.triton.experts.hopper.epilogues import tensor_store
from moesaic.kernels.triton.quantized.hopper.codes import ask, operands, selectors, words_of
from moesaic.kernels.triton.quantized.hopper.copies import TALL, fill, look, recall

# Two dozen arguments read better in rows than in columns.
# fmt: off


@gluon.jit
def places(expert, n, which, OUTPUTS, width, groups, PAIR: gl.constexpr):
    """Where a tile's scales and columns begin. The last tile of a matrix whose rows are no multiple of a tile makes
    some of the one before it again; a program that has no tile still reads scales of one, whatever its `n`."""
    if PAIR:
        column = gl.maximum(gl.minimum(n * 64, width - 64), 0) + which * 32
    else:
        column = gl.maximum(gl.minimum(n * 128, width - 128), 0) + which * 64
    return expert.to(gl.int64) * groups * OUTPUTS + column, column


@gluon.jit
def promote(total, dot, scale, zero, zeros, sums, stage, first: gl.constexpr, mma: gl.constexpr):
    """What 64 inputs add to the result; `sums` are those of the inputs, where there are zeros."""
    if zeros is not None:
        zero = gl.convert_layout(zero.to(gl.float32), gl.SliceLayout(1, mma))
        of_x = sums.index(stage).slice(first, 64).load(gl.SliceLayout(0, mma))
        dot = gl.fma(-zero[:, None].broadcast_to([64, 64]), of_x[None, :].broadcast_to([64, 64]), dot)
    scale = gl.convert_layout(scale.to(gl.float32), gl.SliceLayout(1, mma))
    return gl.fma(dot, scale[:, None].broadcast_to([64, 64]), total)


@gluon.jit
def send(out_map, staging, total, row, column, PAIR: gl.constexpr):
    """Rows of the result are columns of the tile: they turn on their way through shared memory."""
    tile = total.to(gl.bfloat16)
    if PAIR:
        low, high = tile.reshape([4, 2, 8, 64]).permute([0, 2, 3, 1]).split()
        gate = low.to(gl.float32)
        hidden = gate / (1.0 + gl.exp(-gate)) * high.to(gl.float32)
        tile = hidden.to(gl.bfloat16).reshape([32, 64])
    staging.store(tile.permute([1, 0]))
    fence_async_shared()
    tensor_store(out_map, [row, column], staging)


@gluon.jit
def begin(made, x, stage, PARTS: gl.constexpr, mma: gl.constexpr):
    """Start to multiply 64 inputs, each part of x by itself."""
    nothing = gl.zeros([64, 64], gl.float32, mma)
    dots = ()
    for part in gl.static_range(PARTS):
        tile = x.index(stage).slice(part * 64, 64).permute([1, 0])
        dots = dots + (warpgroup_mma(made, tile, nothing, use_acc=False, is_async=True),)
    return dots


@gluon.jit
def finish(
    dots, totals, scale, zero, zeros, sums, empty, stage, PARTS: gl.constexpr, mma: gl.constexpr,
):
    """Scale and add one part while the next is multiplied."""
    added = ()
    for part in gl.static_range(PARTS):
        dot = warpgroup_mma_wait(num_outstanding=PARTS - 1 - part, deps=(dots[part],))
        if zeros is None:
            if part == PARTS - 1:
                mbarrier.arrive(empty.index(stage))
        added = added + (promote(totals[part], dot, scale, zero, zeros, sums, stage, part * 64, mma),)
    if zeros is not None:
        mbarrier.arrive(empty.index(stage))
    return added


@gluon.jit
def matmul_tile(
    words, asked, scales, zeros, bias, out_map, rows, selector, step, next_step, codes, x, sums, ready, empty, which,
    staging, iteration, blocks, OUTPUTS, row, column, PARTS: gl.constexpr, PAIR: gl.constexpr, BITS: gl.constexpr,
    QUANTUM: gl.constexpr, STAGES: gl.constexpr,
):
    """64 rows of weights times PARTS times 64 rows of x. Returns the codes, scales and zeros that the next tile begins
    with: codes are unpacked while what was unpacked before is multiplied."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    PER: gl.constexpr = 8 // BITS
    totals = ()
    for _ in gl.static_range(PARTS):
        totals = totals + (gl.zeros([64, 64], gl.float32, mma),)
    for k in range(blocks):
        scale, scale_high, zero, zero_high = asked
        made = operands(words[0], words[1], selector, mma, BITS)
        ended = k + 1 == blocks
        place = (k + 1) * 64 * PER
        asked = ask(
            scales, zeros, rows, gl.where(ended, next_step, step + place // QUANTUM * OUTPUTS),
            gl.where(ended, next_step + 64 // QUANTUM * OUTPUTS, step + (place + 64) // QUANTUM * OUTPUTS), BITS,
            QUANTUM,
        )
        for half in gl.static_range(PER):
            stage = iteration % STAGES
            if half > 0:
                mbarrier.wait(ready.index(stage), (iteration // STAGES) & 1)
            dots = begin(made[half], x, stage, PARTS, mma)
            if half == PER - 1:
                after = (iteration + 1) % STAGES
                mbarrier.wait(ready.index(after), ((iteration + 1) // STAGES) & 1)
                words = words_of(codes.index(after // PER).slice(which * 64, 64), PAIR)
            totals = finish(
                dots, totals, (scale, scale_high)[half], (zero, zero_high)[half], zeros, sums, empty, stage,
                PARTS, mma,
            )
            iteration += 1
    tma.store_wait(0)
    for part in gl.static_range(PARTS):
        total = totals[part]
        if bias is not None:
            total += gl.load(bias + column + rows).to(gl.float32)[:, None]
        send(out_map, staging.slice(part * 64, 64), total, row + part * 64, column, PAIR)
    return words, asked, iteration


@gluon.jit
def multiply(
    which, scales, zeros, bias, out_map, table, total, tiles_n, ROWS, blocks, width, OUTPUTS, groups, codes, x, sums,
    ready, empty, staging, PAIR: gl.constexpr, BITS: gl.constexpr, QUANTUM: gl.constexpr, NEAR: gl.constexpr,
    STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """One warpgroup: 64 rows of weights (or 32 of gate and as many of up), all inputs, then its epilogue."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, mma))
    if PAIR:
        rows = rows // 16 * 8 + rows % 8 + rows % 16 // 8 * width
    selector = selectors()
    iteration = 0
    hop = gl.num_programs(0)
    record = recall(look(gl.program_id(0), total, table, tiles_n, ROWS, RECORD))
    following = look(gl.program_id(0) + hop, total, table, tiles_n, ROWS, RECORD)
    m, n = settle(gl.program_id(0), record[1], record[2], tiles_n, NEAR)
    next_step, next_column = places(record[0], n, which, OUTPUTS, width, groups, PAIR)
    asked = ask(scales, zeros, rows, next_step, next_step + 64 // QUANTUM * OUTPUTS, BITS, QUANTUM)
    mbarrier.wait(ready.index(0), 0)
    words = words_of(codes.index(0).slice(which * 64, 64), PAIR)
    for tile in range(gl.program_id(0), total, hop):
        row = m * TALL
        at = record[3] + row
        wide = row + 64 < record[4]
        step, column = next_step, next_column
        record = recall(following)
        following = look(tile + 2 * hop, total, table, tiles_n, ROWS, RECORD)
        m, n = settle(gl.minimum(tile + hop, total - 1), record[1], record[2], tiles_n, NEAR)
        next_step, next_column = places(record[0], n, which, OUTPUTS, width, groups, PAIR)
        if wide:
            words, asked, iteration = matmul_tile(
                words, asked, scales, zeros, bias, out_map, rows, selector, step, next_step, codes, x, sums, ready,
                empty, which, staging, iteration, blocks, OUTPUTS, at, column, 2, PAIR, BITS, QUANTUM, STAGES,
            )
        else:
            words, asked, iteration = matmul_tile(
                words, asked, scales, zeros, bias, out_map, rows, selector, step, next_step, codes, x, sums, ready,
                empty, which, staging, iteration, blocks, OUTPUTS, at, column, 1, PAIR, BITS, QUANTUM, STAGES,
            )
    tma.store_wait(0)


@gluon.jit
def quantized_matmul(
    codes_map, scales, zeros, bias, x_map, sums_map, out_map, table, totals, tiles_n, ROWS, stride, steps, width,
    OUTPUTS, groups, PAIR: gl.constexpr, BITS: gl.constexpr, QUANTUM: gl.constexpr, NEAR: gl.constexpr,
    STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """`steps` of 64 inputs. `width`: columns of the result, of a pair half of the weights' rows. NEAR: row tiles that
    walk the columns together, for the L2 cache."""
    PER: gl.constexpr = 8 // BITS
    codes = gl.allocate_shared_memory(gl.int32, [STAGES // PER, 128, 16], codes_map.layout)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TALL, 64], gl.bfloat16)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TALL, 64], x_layout)
    sums = x  # not read
    if sums_map is not None:
        sums = gl.allocate_shared_memory(gl.float32, [STAGES, TALL], sums_map.layout)
    COLUMNS: gl.constexpr = 32 if PAIR else 64
    out_low = gl.allocate_shared_memory(gl.bfloat16, [TALL, COLUMNS], out_map.layout)
    out_high = gl.allocate_shared_memory(gl.bfloat16, [TALL, COLUMNS], out_map.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if table is None:
        total = (ROWS + TALL - 1) // TALL * tiles_n
    else:
        total = gl.load(totals) * tiles_n
    blocks = steps // PER
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    0, scales, zeros, bias, out_map, table, total, tiles_n, ROWS, blocks, width, OUTPUTS, groups,
                    codes, x, sums, ready, empty, out_low, PAIR, BITS, QUANTUM, NEAR, STAGES, RECORD,
                ),
            ),
            (
                multiply,
                (
                    1, scales, zeros, bias, out_map, table, total, tiles_n, ROWS, blocks, width, OUTPUTS, groups,
                    codes, x, sums, ready, empty, out_high, PAIR, BITS, QUANTUM, NEAR, STAGES, RECORD,
                ),
            ),
            (
                fill,
                (
                    codes_map, x_map, sums_map, table, total, tiles_n, ROWS, stride, steps, OUTPUTS, width, codes, x,
                    sums, ready, empty, PAIR, BITS, NEAR, STAGES, RECORD,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
