"""One persistent kernel for all the matmuls of the experts on Hopper; `grouped.py` says what it does and calls it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moesaic.kernels.triton.experts.hopper.copies import fill, fill_gathered, look, recall, settle
from moesaic.kernels.triton.experts.hopper.epilogues import finish_chained, halves, send, send_part

# Two dozen arguments read better in rows than in columns.
# fmt: off


@gluon.jit
def multiply(
    which, c_map, h_map, g_map, table, total, tiles_m, tiles_n, depth, width, a, b, ready, empty, staging, weights,
    dots, sources, ROWS, GATHERED: gl.constexpr, COLUMNS: gl.constexpr, B_ROWS: gl.constexpr, PAIR: gl.constexpr,
    CHAIN: gl.constexpr, SAVE: gl.constexpr, CUT_ROWS: gl.constexpr, CUT_COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """One warpgroup: half of the tile's rows, whole K, then its epilogue."""
    WIDTH: gl.constexpr = BN // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    iteration = 0
    hop = gl.num_programs(0)
    record = look(gl.program_id(0), total, table, tiles_m, tiles_n, COLUMNS, RECORD)
    for tile in range(gl.program_id(0), total, hop):
        expert, first, span, start, count = recall(record, COLUMNS)
        record = look(tile + hop, total, table, tiles_m, tiles_n, COLUMNS, RECORD)
        m, n = settle(tile, first, span, tiles_n, GROUP)
        row = m * (2 * HALF) + which * HALF
        chunks = BN // STEP
        if CUT_COLUMNS:
            chunks = gl.minimum(width - n * BN, BN) // STEP
        if COLUMNS:
            steps = (count + STEP - 1) // STEP
            mine = row < depth
        else:
            steps = depth // STEP
            mine = row < count
        if mine:
            accumulator = gl.zeros([HALF, BN], gl.float32, layout)
            for k in range(steps):
                stage = iteration % STAGES
                mbarrier.wait(ready.index(stage), (iteration // STAGES) & 1)
                if GATHERED:  # ordinary copies wrote it, the tensor cores will read it
                    fence_async_shared()
                a_tile = a.index(stage)
                b_tile = b.index(stage)
                if COLUMNS:
                    a_tile = a_tile.permute([1, 0])
                if B_ROWS:
                    b_tile = b_tile.permute([1, 0])
                accumulator = warpgroup_mma(a_tile, b_tile, accumulator, is_async=True)
                accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(accumulator,))
                mbarrier.arrive(empty.index((iteration + STAGES - 1) % STAGES), pred=k > 0)
                iteration += 1
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
            mbarrier.arrive(empty.index((iteration + STAGES - 1) % STAGES), pred=steps > 0)
            if COLUMNS:
                to = expert * depth + row
            else:
                to = start + row
            if CHAIN:
                low, high = halves(accumulator.to(gl.bfloat16), HALF, WIDTH)
                if BN == 128:
                    staging.index(0).store(low)
                    staging.index(1).store(high)
                else:
                    one, two = halves(low, HALF, STEP)
                    three, four = halves(high, HALF, STEP)
                    staging.index(0).store(one)
                    staging.index(1).store(two)
                    staging.index(2).store(three)
                    staging.index(3).store(four)
                finish_chained(
                    staging, c_map, h_map, a, ready, empty, iteration, weights, dots, sources, ROWS, start, row,
                    count, n, width, chunks, HALF, BN, STEP, STAGES,
                )
                iteration += 2 * chunks
            elif PAIR:
                low, high = halves(accumulator.to(gl.bfloat16), HALF, WIDTH)
                # Rounded first, so that the backward pass, which keeps only the rounded ones, recomputes the same bits.
                gate = low.to(gl.float32)
                hidden = gate / (1.0 + gl.exp(-gate)) * high.to(gl.float32)
                if SAVE:
                    send(g_map, to, n * WIDTH, staging, low)
                    send(c_map, to, width + n * WIDTH, staging, high)
                send(h_map, to, n * WIDTH, staging, hidden.to(gl.bfloat16))
            elif CUT_ROWS:
                low, high = halves(accumulator.to(gl.bfloat16), HALF, WIDTH)
                send_part(c_map, to, n * BN, staging, low, depth - row, HALF)
                send_part(c_map, to, n * BN + WIDTH, staging, high, depth - row, HALF)
            else:
                low, high = halves(accumulator.to(gl.bfloat16), HALF, WIDTH)
                send(c_map, to, n * BN, staging, low)
                send(c_map, to, n * BN + WIDTH, staging, high)
        else:
            if CHAIN:
                steps += 2 * chunks
            for _ in range(steps):
                stage = iteration % STAGES
                mbarrier.wait(ready.index(stage), (iteration // STAGES) & 1)
                mbarrier.arrive(empty.index(stage))
                iteration += 1
    tma.store_wait(0)


@gluon.jit
def grouped_matmul(
    a, b, c_map, h_map, g_map, weights, dots, sources, table, totals, tiles_m, tiles_n, depth, width, stride, ROWS,
    GATHER_A: gl.constexpr, GATHER_B: gl.constexpr, CHOICES: gl.constexpr, COLUMNS: gl.constexpr, B_ROWS:
    gl.constexpr, PAIR: gl.constexpr, CHAIN: gl.constexpr, SAVE: gl.constexpr, CUT_ROWS: gl.constexpr, CUT_COLUMNS:
    gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, STAGES:
    gl.constexpr, RECORD: gl.constexpr,
):
    """`a` and `b` are tensor maps, or a pointer for the one that is gathered. `width`: the columns of C, or those of
    gate alone. CUT_ROWS, CUT_COLUMNS: the last half tile of rows, the last tile of columns is not whole."""
    GATHERED: gl.constexpr = GATHER_A or GATHER_B
    A_SHAPE: gl.constexpr = [STEP, HALF] if COLUMNS else [HALF, STEP]
    B_SHAPE: gl.constexpr = [BN, STEP] if B_ROWS else [STEP, BN]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, gl.bfloat16)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_SHAPE, gl.bfloat16)
    a_low = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + A_SHAPE, a_layout)
    a_high = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + A_SHAPE, a_layout)
    b_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + B_SHAPE, b_layout)
    OUT_SHAPE: gl.constexpr = [BN // STEP, HALF, STEP] if CHAIN else [HALF, BN // 2]
    out_low = gl.allocate_shared_memory(gl.bfloat16, OUT_SHAPE, c_map.layout)
    out_high = gl.allocate_shared_memory(gl.bfloat16, OUT_SHAPE, c_map.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129 if GATHERED else 1)  # every gathering thread, and the tensor copies
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if COLUMNS:
        total = tiles_m * tiles_n * totals
    else:
        total = gl.load(totals) * tiles_n
    if GATHERED:
        x = b if GATHER_B else a
        other = a if GATHER_B else b
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        0, c_map, h_map, g_map, table, total, tiles_m, tiles_n, depth, width, a_low, b_tiles,
                        ready, empty, out_low, weights, dots, sources, ROWS, GATHERED, COLUMNS, B_ROWS, PAIR, CHAIN,
                        SAVE, CUT_ROWS, CUT_COLUMNS, GROUP, HALF, BN, STEP, STAGES, RECORD,
                    ),
                ),
                (
                    multiply,
                    (
                        1, c_map, h_map, g_map, table, total, tiles_m, tiles_n, depth, width, a_high, b_tiles,
                        ready, empty, out_high, weights, dots, sources, ROWS, GATHERED, COLUMNS, B_ROWS, PAIR, CHAIN,
                        SAVE, CUT_ROWS, CUT_COLUMNS, GROUP, HALF, BN, STEP, STAGES, RECORD,
                    ),
                ),
                (
                    fill_gathered,
                    (
                        x, stride, sources, other, g_map, table, total, tiles_m, tiles_n, depth, width, a_low, a_high,
                        b_tiles, ready, empty, CHOICES, GATHER_B, COLUMNS, B_ROWS, PAIR, CHAIN, CUT_COLUMNS, GROUP,
                        HALF, BN, STEP, STAGES, RECORD,
                    ),
                ),
            ],
            [4, 4],
            [208, 88],
        )
    else:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        0, c_map, h_map, g_map, table, total, tiles_m, tiles_n, depth, width, a_low, b_tiles,
                        ready, empty, out_low, weights, dots, sources, ROWS, GATHERED, COLUMNS, B_ROWS, PAIR, CHAIN,
                        SAVE, CUT_ROWS, CUT_COLUMNS, GROUP, HALF, BN, STEP, STAGES, RECORD,
                    ),
                ),
                (
                    multiply,
                    (
                        1, c_map, h_map, g_map, table, total, tiles_m, tiles_n, depth, width, a_high, b_tiles,
                        ready, empty, out_high, weights, dots, sources, ROWS, GATHERED, COLUMNS, B_ROWS, PAIR, CHAIN,
                        SAVE, CUT_ROWS, CUT_COLUMNS, GROUP, HALF, BN, STEP, STAGES, RECORD,
                    ),
                ),
                (
                    fill,
                    (
                        a, b, g_map, table, total, tiles_m, tiles_n, depth, width, a_low, a_high, b_tiles, ready,
                        empty, COLUMNS, B_ROWS, PAIR, CHAIN, CUT_COLUMNS, GROUP, HALF, BN, STEP, STAGES, RECORD,
                    ),
                ),
            ],
            [4, 1],
            [232, 40],
        )
