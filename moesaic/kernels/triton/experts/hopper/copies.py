"""The copying side of the Hopper matmuls: which tile is next, and its operands into shared memory ahead of their use.

Whole tiles go through the bulk tensor copy engine, issued by one warp. Rows in token order are gathered by a warpgroup
with 16-byte asynchronous copies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Both were renamed after triton 3.6.
tensor_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
row_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# Two dozen arguments read better in rows than in columns.
# fmt: off


@gluon.jit
def look(tile, total, table, tiles_m, tiles_n, COLUMNS: gl.constexpr, RECORD: gl.constexpr):
    """The record of a tile: expert, its first tile, its tiles, its first row, its rows. Read one tile ahead of its use:
    the tensor cores would otherwise stand still for this latency at every tile."""
    tile = gl.minimum(tile, total - 1)
    # Zero, but not to the compiler: it must not see that all threads load the same, or it waits to share the value.
    table += gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=True, pack=1) * (total >> 31)
    if COLUMNS:
        expert = tile // (tiles_m * tiles_n)
        record = table + expert * RECORD
        first = expert * tiles_m
        span = tiles_m
    else:
        record = table + (tile // tiles_n) * RECORD
        expert = gl.load(record)
        first = gl.load(record + 1)
        span = gl.load(record + 2)
    return expert, first, span, gl.load(record + 3), gl.load(record + 4)


@gluon.jit
def known(value):
    """A number that `look` loaded earlier, made the same for all threads where it is used."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def recall(record, COLUMNS: gl.constexpr):
    if COLUMNS:
        return record[0], record[1], record[2], known(record[3]), known(record[4])
    else:
        return known(record[0]), known(record[1]), known(record[2]), known(record[3]), known(record[4])


@gluon.jit
def settle(tile, first, span, tiles_n, GROUP: gl.constexpr):
    """Row and column of an output tile within its expert: neighbours in time share operands in the L2 cache."""
    local = tile - first * tiles_n
    base = local // (GROUP * tiles_n) * GROUP
    size = gl.minimum(span - base, GROUP)
    inside = local - base * tiles_n
    return base + inside % size, inside // size


@gluon.jit
def fill(
    a_map, b_map, g_map, table, total, tiles_m, tiles_n, depth, width, a_low, a_high, b, ready, empty, COLUMNS:
    gl.constexpr, B_ROWS: gl.constexpr, PAIR: gl.constexpr, CHAIN: gl.constexpr, CUT_COLUMNS: gl.constexpr, GROUP:
    gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """The copying warp: keep every stage full."""
    LOW: gl.constexpr = (HALF + BN) * STEP * 2
    BOTH: gl.constexpr = (2 * HALF + BN) * STEP * 2
    iteration = 0
    hop = gl.num_programs(0)
    record = look(gl.program_id(0), total, table, tiles_m, tiles_n, COLUMNS, RECORD)
    for tile in range(gl.program_id(0), total, hop):
        expert, first, span, start, count = recall(record, COLUMNS)
        record = look(tile + hop, total, table, tiles_m, tiles_n, COLUMNS, RECORD)
        m, n = settle(tile, first, span, tiles_n, GROUP)
        row = m * (2 * HALF)
        if COLUMNS:
            steps = (count + STEP - 1) // STEP
            wide = row + HALF < depth
        else:
            steps = depth // STEP
            wide = row + HALF < count
        for k in range(steps):
            stage = iteration % STAGES
            mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
            arrived = ready.index(stage)
            mbarrier.expect(arrived, BOTH, pred=wide)
            mbarrier.expect(arrived, LOW, pred=wide == 0)
            if COLUMNS:
                at = start + k * STEP
                tensor_load(a_map, [at, row], arrived, a_low.index(stage))
                tensor_load(a_map, [at, row + HALF], arrived, a_high.index(stage), pred=wide)
                tensor_load(b_map, [at, n * BN], arrived, b.index(stage))
            else:
                at = k * STEP
                tensor_load(a_map, [start + row, at], arrived, a_low.index(stage))
                tensor_load(
                    a_map, [start + row + HALF, at], arrived, a_high.index(stage), pred=wide
                )
                if PAIR:
                    gate = expert * 2 * width + n * (BN // 2)
                    both = b.index(stage)
                    tensor_load(b_map, [gate, at], arrived, both.slice(0, BN // 2))
                    tensor_load(b_map, [gate + width, at], arrived, both.slice(BN // 2, BN // 2))
                elif B_ROWS:
                    tensor_load(
                        b_map, [expert * width + n * BN, at], arrived, b.index(stage)
                    )
                else:
                    tensor_load(b_map, [expert * depth + at, n * BN], arrived, b.index(stage))
            iteration += 1
        if CHAIN:  # then gate and up, in columns of STEP, take the place of A
            chunks = BN // STEP
            if CUT_COLUMNS:
                chunks = gl.minimum(width - n * BN, BN) // STEP
            for part in range(2 * chunks):
                stage = iteration % STAGES
                mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                arrived = ready.index(stage)
                column = part % 2 * width + n * BN + part // 2 * STEP
                mbarrier.expect(arrived, 2 * HALF * STEP * 2, pred=wide)
                mbarrier.expect(arrived, HALF * STEP * 2, pred=wide == 0)
                tensor_load(g_map, [start + row, column], arrived, a_low.index(stage))
                tensor_load(
                    g_map, [start + row + HALF, column], arrived, a_high.index(stage), pred=wide
                )
                iteration += 1


@gluon.jit
def gather(buffer, x, source, column, stride, CHOICES: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Rows of x into shared memory, 16 bytes a thread; zeros where there is no assignment (reading any one row for all
    the padding of all experts would make every processor wait for the same line of the L2 cache)."""
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    token = (gl.maximum(source, 0) // CHOICES).to(gl.int64)
    row_load(
        buffer, x + token[:, None] * stride + columns[None, :], mask=(source >= 0)[:, None]
    )


@gluon.jit
def assignments(sources, start, position, count):
    """Whose rows these are; -1 in padding."""
    return gl.load(sources + start + position, mask=position < count, other=-1)


@gluon.jit
def fill_gathered(
    x, stride, sources, other_map, g_map, table, total, tiles_m, tiles_n, depth, width, a_low, a_high, b, ready, empty,
    CHOICES: gl.constexpr, GATHER_B: gl.constexpr, COLUMNS: gl.constexpr, B_ROWS: gl.constexpr, PAIR: gl.constexpr,
    CHAIN: gl.constexpr, CUT_COLUMNS: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STEP:
    gl.constexpr, STAGES: gl.constexpr, RECORD: gl.constexpr,
):
    """The copying warpgroup when one operand is rows of a tensor in token order: `x` is gathered as it is read."""
    WIDTH: gl.constexpr = BN if GATHER_B else (HALF if COLUMNS else STEP)
    ROWS: gl.constexpr = STEP if COLUMNS else HALF
    # Eight threads fill one 128-byte row: no bank is hit twice, and a thread follows few rows.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    iteration = 0
    hop = gl.num_programs(0)
    record = look(gl.program_id(0), total, table, tiles_m, tiles_n, COLUMNS, RECORD)
    following = look(gl.program_id(0) + hop, total, table, tiles_m, tiles_n, COLUMNS, RECORD)
    m, n = settle(gl.program_id(0), record[1], record[2], tiles_n, GROUP)
    if COLUMNS:
        m = 0
    next_low = assignments(sources, record[3], m * (2 * HALF) + lane, record[4])
    next_high = assignments(sources, record[3], m * (2 * HALF) + HALF + lane, record[4])
    for tile in range(gl.program_id(0), total, hop):
        # Two tiles ahead, so that whose rows the next tile reads is known when it starts.
        expert, first, span, start, count = recall(record, COLUMNS)
        record = recall(following, COLUMNS)
        following = look(tile + 2 * hop, total, table, tiles_m, tiles_n, COLUMNS, RECORD)
        low_source = next_low
        high_source = next_high
        m, n = settle(gl.minimum(tile + hop, total - 1), record[1], record[2], tiles_n, GROUP)
        if COLUMNS:
            m = 0
        next_low = assignments(sources, record[3], m * (2 * HALF) + lane, record[4])
        next_high = assignments(sources, record[3], m * (2 * HALF) + HALF + lane, record[4])
        m, n = settle(tile, first, span, tiles_n, GROUP)
        row = m * (2 * HALF)
        if COLUMNS:
            steps = (count + STEP - 1) // STEP
            wide = row + HALF < depth
            source = low_source
            for k in range(steps):
                stage = iteration % STAGES
                rows = source
                source = assignments(sources, start, lane + (k + 1) * STEP, count)
                mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                arrived = ready.index(stage)
                at = start + k * STEP
                if GATHER_B:
                    mbarrier.expect(arrived, 2 * HALF * STEP * 2, pred=wide)
                    mbarrier.expect(arrived, HALF * STEP * 2, pred=wide == 0)
                    tensor_load(other_map, [at, row], arrived, a_low.index(stage))
                    tensor_load(
                        other_map, [at, row + HALF], arrived, a_high.index(stage), pred=wide
                    )
                    gather(b.index(stage), x, rows, n * BN, stride, CHOICES, WIDTH, layout)
                else:
                    mbarrier.expect(arrived, BN * STEP * 2)
                    tensor_load(other_map, [at, n * BN], arrived, b.index(stage))
                    gather(a_low.index(stage), x, rows, row, stride, CHOICES, WIDTH, layout)
                    if wide:
                        gather(a_high.index(stage), x, rows, row + HALF, stride, CHOICES, WIDTH, layout)
                async_copy.mbarrier_arrive(arrived, increment_count=False)
                iteration += 1
        else:
            wide = row + HALF < count
            for k in range(depth // STEP):
                stage = iteration % STAGES
                mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                arrived = ready.index(stage)
                at = k * STEP
                mbarrier.expect(arrived, BN * STEP * 2)
                if PAIR:
                    gate = expert * 2 * width + n * (BN // 2)
                    both = b.index(stage)
                    tensor_load(other_map, [gate, at], arrived, both.slice(0, BN // 2))
                    tensor_load(
                        other_map, [gate + width, at], arrived, both.slice(BN // 2, BN // 2)
                    )
                elif B_ROWS:
                    tensor_load(
                        other_map, [expert * width + n * BN, at], arrived, b.index(stage)
                    )
                else:
                    tensor_load(other_map, [expert * depth + at, n * BN], arrived, b.index(stage))
                gather(a_low.index(stage), x, low_source, at, stride, CHOICES, WIDTH, layout)
                if wide:
                    gather(a_high.index(stage), x, high_source, at, stride, CHOICES, WIDTH, layout)
                async_copy.mbarrier_arrive(arrived, increment_count=False)
                iteration += 1
            if CHAIN:  # then gate and up, in columns of STEP, take the place of A
                chunks = BN // STEP
                if CUT_COLUMNS:
                    chunks = gl.minimum(width - n * BN, BN) // STEP
                for part in range(2 * chunks):
                    stage = iteration % STAGES
                    mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                    arrived = ready.index(stage)
                    column = part % 2 * width + n * BN + part // 2 * STEP
                    mbarrier.expect(arrived, 2 * HALF * STEP * 2, pred=wide)
                    mbarrier.expect(arrived, HALF * STEP * 2, pred=wide == 0)
                    tensor_load(g_map, [start + row, column], arrived, a_low.index(stage))
                    tensor_load(
                        g_map, [start + row + HALF, column], arrived, a_high.index(stage), pred=wide
                    )
                    async_copy.mbarrier_arrive(arrived, increment_count=False)
                    iteration += 1
