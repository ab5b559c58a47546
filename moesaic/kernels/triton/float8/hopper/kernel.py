"""The persistent float8 matmul of many rows on Hopper; `matmul.py` says what it does and calls it."""

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

from moesaic.kernels.triton.experts.hopper.copies import known, look, settle, tensor_load
from moesaic.kernels.triton.experts.hopper.epilogues import send

# Two dozen arguments read better in rows than in columns.
# fmt: off


@gluon.jit
def whose(tile, total, table, tiles_m, tiles_n, P, GROUPED: gl.constexpr, RECORD: gl.constexpr):
    """Expert, its first tile, its tiles, its first row, its rows; without a table all rows are those of one."""
    if GROUPED:
        return look(tile, total, table, tiles_m, tiles_n, False, RECORD)
    else:
        return 0, 0, tiles_m, 0, P


@gluon.jit
def told(record, GROUPED: gl.constexpr):
    if GROUPED:
        return known(record[0]), known(record[1]), known(record[2]), known(record[3]), known(record[4])
    else:
        return record[0], record[1], record[2], record[3], record[4]


@gluon.jit
def promote(total, fresh, scale):
    """A sum of 128 inputs, made by tensor cores in less than float32, scaled and added in float32. No plain `fma`: the
    compiler would put it off until after the next sum is begun, and there are no registers for both."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [fresh, gl.broadcast(scale[:, None], fresh)[0], total],
        gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def scales_at(scales_GP, scales_ENG, x_at, w_at, w_on, TWO: gl.constexpr, TALL: gl.constexpr):
    """Of both parts: of their rows, and of their blocks of weights."""
    x_0 = gl.load(scales_GP + x_at)
    w_0 = gl.load(scales_ENG + w_at)
    x_1 = x_0
    w_1 = w_0
    if TWO:
        if TALL:
            x_1 = gl.load(scales_GP + (x_at + 64))
        else:
            w_1 = gl.load(scales_ENG + (w_at + w_on))
    return x_0, x_1, w_0, w_1


@gluon.jit
def multiply(
    which, c_map, h_map, scales_GP, scales_ENG, bias, hidden_scales_GP, table, total, tiles_m, tiles_n, P, row_stride,
    groups, blocks, width, a, b, ready, empty, staging, GROUPED: gl.constexpr, PAIR: gl.constexpr, SAVE: gl.constexpr,
    GROUP: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """One warpgroup: HALF rows of the tile and all its columns, in one or two parts of 64 x 128. A part's sum is fresh
    for every 128 inputs; while it is added here, the tensor cores work for the other warpgroup."""
    TWO: gl.constexpr = HALF * BN == 64 * 256  # parts
    TALL: gl.constexpr = HALF == 128  # parts are one below the other
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    lane = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, 128, gl.SliceLayout(0, layout))
    # Zero, but not to the compiler: what all threads load alike it would wait for at once, to share it.
    zero = gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=True, pack=1) * (total >> 31)
    iteration = 0
    hop = gl.num_programs(0)
    fresh = gl.zeros([64, 128], gl.float32, layout)
    record = whose(gl.program_id(0), total, table, tiles_m, tiles_n, P, GROUPED, RECORD)
    for tile in range(gl.program_id(0), total, hop):
        expert, first, span, start, count = told(record, GROUPED)
        m, n = settle(tile, first, span, tiles_n, GROUP)
        row = m * (2 * HALF) + which * HALF
        if row < count:
            # Offsets rather than addresses: in the loop below every register counts.
            x_at = start + row + lane
            if PAIR:
                block = n
                other = n + blocks // 2
            else:
                block = n * (BN // 128)
                other = gl.minimum(block + 1, blocks - 1)
            w_at = (expert * blocks + block) * groups + zero
            w_on = (other - block) * groups
            total_0 = gl.zeros([64, 128], gl.float32, layout)
            total_1 = gl.zeros([64, 128], gl.float32, layout)
            x_0, x_1, w_0, w_1 = scales_at(scales_GP, scales_ENG, x_at, w_at, w_on, TWO, TALL)
            for k in range(groups):
                scale_0 = x_0 * w_0
                scale_1 = x_1 * w_1
                stage = iteration % STAGES
                mbarrier.wait(ready.index(stage), (iteration // STAGES) & 1)
                a_0 = a.index(stage).slice(0, 64)
                b_0 = b.index(stage).slice(0, 128).permute([1, 0])
                fresh = warpgroup_mma(a_0, b_0, fresh, use_acc=False, is_async=True)
                fresh = warpgroup_mma_wait(num_outstanding=0, deps=(fresh,))
                if TWO:
                    total_0 = promote(total_0, fresh, scale_0)
                    if TALL:
                        a_1 = a.index(stage).slice(64, 64)
                        b_1 = b_0
                    else:
                        a_1 = a_0
                        b_1 = b.index(stage).slice(128, 128).permute([1, 0])
                    fresh = warpgroup_mma(a_1, b_1, fresh, use_acc=False, is_async=True)
                    ahead = gl.minimum(k + 1, groups - 1)
                    x_0, x_1, w_0, w_1 = scales_at(
                        scales_GP, scales_ENG, x_at + ahead * row_stride, w_at + ahead, w_on, TWO, TALL
                    )
                    fresh = warpgroup_mma_wait(num_outstanding=0, deps=(fresh,))
                    mbarrier.arrive(empty.index(stage))
                    total_1 = promote(total_1, fresh, scale_1)
                else:
                    mbarrier.arrive(empty.index(stage))
                    ahead = gl.minimum(k + 1, groups - 1)
                    x_0, x_1, w_0, w_1 = scales_at(
                        scales_GP, scales_ENG, x_at + ahead * row_stride, w_at + ahead, w_on, TWO, TALL
                    )
                    total_0 = promote(total_0, fresh, scale_0)
                iteration += 1
            # Not before: in the loop above every register counts.
            record = whose(tile + hop, total, table, tiles_m, tiles_n, P, GROUPED, RECORD)
            to = start + row
            if PAIR:
                low = total_0.to(gl.bfloat16)
                high = total_1.to(gl.bfloat16)
                if SAVE:
                    send(c_map, to, n * 128, staging, low)
                    send(c_map, to, width + n * 128, staging, high)
                # The operations of `round_rows`, to its bits.
                gate = low.to(gl.float32)
                hidden = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32) * high.to(gl.float32)
                hidden = hidden.to(gl.bfloat16).to(gl.float32)
                scale = gl.maximum(gl.max(gl.abs(hidden), 1) / 448.0, 1e-12)
                gl.store(hidden_scales_GP + n * row_stride + to + lane, scale)
                send(
                    h_map, to, n * 128, staging._reinterpret(gl.float8e4nv, [64, 128], h_map.layout),
                    (hidden / scale[:, None]).to(gl.float8e4nv),
                )
            else:
                at = n * BN + column
                if bias is not None:
                    total_0 += gl.load(bias + at, mask=at < width, other=0.0).to(gl.float32)[None, :]
                    if TWO:
                        at_1 = at if TALL else at + 128
                        total_1 += gl.load(bias + at_1, mask=at_1 < width, other=0.0).to(gl.float32)[None, :]
                low = total_0.to(gl.bfloat16)
                high = total_1.to(gl.bfloat16)
                send(c_map, to, n * BN, staging, low)
                if TALL:
                    if row + 64 < count:
                        send(c_map, to + 64, n * BN, staging, high)
                elif TWO:
                    send(c_map, to, n * BN + 128, staging, high)
        else:
            record = whose(tile + hop, total, table, tiles_m, tiles_n, P, GROUPED, RECORD)
            for _ in range(groups):
                stage = iteration % STAGES
                mbarrier.wait(ready.index(stage), (iteration // STAGES) & 1)
                mbarrier.arrive(empty.index(stage))
                iteration += 1
    tma.store_wait(0)


@gluon.jit
def fill(
    a_map, b_map, table, total, tiles_m, tiles_n, P, groups, width, a_low, a_high, b, ready, empty,
    GROUPED: gl.constexpr, PAIR: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """The copying warp: keep every stage full."""
    iteration = 0
    hop = gl.num_programs(0)
    record = whose(gl.program_id(0), total, table, tiles_m, tiles_n, P, GROUPED, RECORD)
    for tile in range(gl.program_id(0), total, hop):
        expert, first, span, start, count = told(record, GROUPED)
        record = whose(tile + hop, total, table, tiles_m, tiles_n, P, GROUPED, RECORD)
        m, n = settle(tile, first, span, tiles_n, GROUP)
        row = m * (2 * HALF)
        wide = row + HALF < count
        for k in range(groups):
            stage = iteration % STAGES
            mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
            arrived = ready.index(stage)
            mbarrier.expect(arrived, (2 * HALF + BN) * 128, pred=wide)
            mbarrier.expect(arrived, (HALF + BN) * 128, pred=wide == 0)
            at = k * 128
            tensor_load(a_map, [start + row, at], arrived, a_low.index(stage))
            tensor_load(a_map, [start + row + HALF, at], arrived, a_high.index(stage), pred=wide)
            if PAIR:
                gate = expert * 2 * width + n * 128
                both = b.index(stage)
                tensor_load(b_map, [gate, at], arrived, both.slice(0, 128))
                tensor_load(b_map, [gate + width, at], arrived, both.slice(128, 128))
            else:
                tensor_load(b_map, [expert * width + n * BN, at], arrived, b.index(stage))
            iteration += 1


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "P", "row_stride", "groups", "blocks", "width"])
def float8_matmul(
    a_map, b_map, c_map, h_map, scales_GP, scales_ENG, bias, hidden_scales_GP, table, totals, tiles_m, tiles_n, P,
    row_stride, groups, blocks, width, GROUPED: gl.constexpr, PAIR: gl.constexpr, SAVE: gl.constexpr,
    GROUP: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """`width`: the columns of C, or those of gate alone. `row_stride`: from a group's scales of rows to the next's."""
    a_low = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, HALF, 128], a_map.layout)
    a_high = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, HALF, 128], a_map.layout)
    b = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], b_map.layout)
    out_low = gl.allocate_shared_memory(gl.bfloat16, [64, 128], c_map.layout)
    out_high = gl.allocate_shared_memory(gl.bfloat16, [64, 128], c_map.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if GROUPED:
        total = gl.load(totals) * tiles_n
    else:
        total = tiles_m * tiles_n
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    0, c_map, h_map, scales_GP, scales_ENG, bias, hidden_scales_GP, table, total, tiles_m, tiles_n, P,
                    row_stride, groups, blocks, width, a_low, b, ready, empty, out_low, GROUPED, PAIR, SAVE, GROUP,
                    HALF, BN, STAGES, RECORD,
                ),
            ),
            (
                multiply,
                (
                    1, c_map, h_map, scales_GP, scales_ENG, bias, hidden_scales_GP, table, total, tiles_m, tiles_n, P,
                    row_stride, groups, blocks, width, a_high, b, ready, empty, out_high, GROUPED, PAIR, SAVE, GROUP,
                    HALF, BN, STAGES, RECORD,
                ),
            ),
            (
                fill,
                (
                    a_map, b_map, table, total, tiles_m, tiles_n, P, groups, width, a_low, a_high, b, ready, empty,
                    GROUPED, PAIR, GROUP, HALF, BN, STAGES, RECORD,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
