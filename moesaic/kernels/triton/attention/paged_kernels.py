"""The kernels of attention over a paged cache (`paged.py` says how keys are walked, and why so).

A cached row is a key of C numbers and a value of as many; or, where ROPE_SIZE is not 0, a latent of C numbers that is
key and value at once, and ROPE_SIZE more that are part of the key alone. All query heads share a latent. With CHOSEN,
the keys of a token are those its row of `chosen_TK` says, where they lie in the cache, in order and `most` of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOTHING = tl.constexpr(-1e30)  # the largest score of no keys; finite, so that differences are


# Four numbers of 8 bits to bf16: each in the upper half of a word's half, its exponent moved to where bf16 has one, and
# what the two forms take from exponents made up for by a factor of 2^120. Smallest numbers come out right too.
WIDEN = tl.constexpr("""
{
.reg .b32 a, b, c, d, m;
mov.b32 m, 0x7b807b80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 a, a, 0x80008000, c, 0xea;
lop3.b32 b, b, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, a, m;
mul.rn.bf16x2 $1, b, m;
}
""")


@triton.jit
def widened(x, kind: tl.constexpr, FAST: tl.constexpr):
    if FAST:
        wide = tl.inline_asm_elementwise(
            WIDEN, "=r,=r,r", [x.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=False, pack=4
        )
    else:
        wide = x.to(kind)
    return wide


@triton.jit
def attend_split(
    q,
    rotated,
    begin,
    end,
    position,
    sequence_pages,
    chosen,
    keys,
    values,
    tree_row,
    cached,
    window,
    scale,
    head,
    N,
    C,
    page_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONES: tl.constexpr,
    WINDOWED: tl.constexpr,
    TREE: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys begin..end of one sequence: the largest score of each row, its sum of weights, its weighted values."""
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, rotated.shape[1])
    head = 0 if ROPE_SIZE else head
    best = tl.full([ROWS], NOTHING, tl.float32)
    weights = tl.zeros([ROWS, ONES], tl.float32)
    out = tl.zeros([ROWS, BLOCK_C], tl.float32)
    ones = tl.full([BLOCK, ONES], 1.0, q.dtype)
    FAST: tl.constexpr = PACKED and keys.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16
    for base in tl.range(begin, end, BLOCK, num_stages=STAGES):
        key = base + tl.arange(0, BLOCK)
        inside = key < end
        if CHOSEN:
            slot = tl.load(chosen + key, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(sequence_pages + key // page_size, mask=inside, other=0).to(tl.int64)
            slot = page * page_size + key % page_size
        at = (slot * N + head) * (C + ROPE_SIZE)
        both = inside[:, None] & (c[None, :] < C)
        k = widened(tl.load(keys + at[:, None] + c[None, :], mask=both, other=0.0), q.dtype, FAST)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if ROPE_SIZE:
            more = inside[:, None] & (r[None, :] < ROPE_SIZE)
            k_rotated = widened(tl.load(keys + at[:, None] + C + r[None, :], mask=more, other=0.0), q.dtype, FAST)
            scores = tl.dot(rotated, tl.trans(k_rotated), scores, input_precision=PRECISION)
        scores = scores * scale
        seen = (key[None, :] <= position[:, None]) & inside[None, :]
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        if TREE:
            draft = key[None, :] - cached
            allowed = tl.load(tree_row[:, None] + draft, mask=seen & (draft >= 0), other=1)
            seen = seen & (allowed != 0)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - new)
        p = tl.exp2(scores - new[:, None]).to(q.dtype)
        best = new
        v = k
        if not ROPE_SIZE:
            v = widened(tl.load(values + at[:, None] + c[None, :], mask=both, other=0.0), q.dtype, FAST)
        weights = tl.dot(p, ones, weights * shrink[:, None], input_precision=PRECISION)
        out = tl.dot(p, v, out * shrink[:, None], input_precision=PRECISION)
    return best, tl.max(weights, 1), out


@triton.jit
def queries(q_THC, at, known, c, C, q_part: tl.constexpr, ROPE_SIZE: tl.constexpr):
    """Rows of queries: what meets the C numbers of a key, and what meets the ROPE_SIZE ones."""
    q = tl.load(q_THC + at[:, None] + c[None, :], mask=known[:, None] & (c[None, :] < C), other=0.0)
    rotated = q
    if ROPE_SIZE:
        r = tl.arange(0, q_part)
        inside = known[:, None] & (r[None, :] < ROPE_SIZE)
        rotated = tl.load(q_THC + at[:, None] + C + r[None, :], mask=inside, other=0.0)
    return q, rotated


@triton.jit
def prefetch_split(begin, last, sequence_pages, keys, values, head, N, C, page_size, SPLIT: tl.constexpr):
    """Nearly all keys and values are old: have a split of them read into the L2 cache while the newest are made."""
    key = tl.minimum(begin + tl.arange(0, SPLIT), tl.maximum(last, 0))
    page = tl.load(sequence_pages + key // page_size).to(tl.int64)
    half = tl.arange(0, 2) * (C // 2)
    at = (((page * page_size + key % page_size) * N + head) * C)[:, None] + half[None, :]
    for_keys = (keys + at).to(tl.int64, bitcast=True)
    for_values = (values + at).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [for_keys], tl.int32, is_pure=False, pack=1
    )
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [for_values], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def combined(best, weight, out, new_best, new_weight, new_out):
    """Two splits as one. Products and sums are spelled out, so that no compiler joins them one way here and another way
    there."""
    top = tl.maximum(best, new_best)
    old_share = tl.exp2(best - top)
    new_share = tl.exp2(new_best - top)
    weight = tl.fma(weight, old_share, new_weight * new_share)
    out = tl.fma(out, old_share[:, None], new_out * new_share[:, None])
    return top, weight, out


@triton.jit
def with_sink(weight, best, sinks_H, head, known):
    """A head's sink is one more score, of no key: it has a weight, and no value."""
    sink = tl.load(sinks_H + head, mask=known, other=0.0).to(tl.float32)
    return weight + tl.exp2(tl.fma(sink, 1.4426950408889634, -best))


@triton.jit
def logarithm(best, weight):
    """Of the sum of what scores are exponents of, to the base of e."""
    return (best + tl.log2(weight)) * 0.6931471805599453


@triton.jit
def decode_kernel(
    q_THC,
    keys,
    values,
    positions_T,
    sequences_T,
    page_table_SP,
    tiles_X2,
    trees_TM,
    cached_S,
    chosen_TK,
    best_PTH,
    weight_PTH,
    out_PTHC,
    T,
    H,
    N,
    C,
    pages,
    page_size,
    drafts,
    window,
    most,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONES: tl.constexpr,
    WINDOWED: tl.constexpr,
    TREE: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one tile's keys, for the query heads that share one key head."""
    tile, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles_X2 + 2 * tile).to(tl.int64)
    count = tl.load(tiles_X2 + 2 * tile + 1)
    last = tl.load(positions_T + first + count - 1)
    if CHOSEN:
        last = tl.minimum(last, most - 1)
    sequence = tl.load(sequences_T + first).to(tl.int64)
    begin = number * SPLIT
    if PDL:  # where tokens stand was known before the forward began; keys and queries were not
        gdc_launch_dependents()
        if PREFETCH:
            prefetch_split(
                begin, last, page_table_SP + sequence * pages, keys, values, head, N, C, page_size, SPLIT
            )  # fmt: skip
        gdc_wait()
    if begin <= last:
        row = tl.arange(0, ROWS)
        token = first + row // GROUP
        known = row // GROUP < count
        position = tl.load(positions_T + token, mask=known, other=-1)
        c = tl.arange(0, BLOCK_C)
        q_head = head * GROUP + row % GROUP
        q, rotated = queries(q_THC, (token * H + q_head) * (C + ROPE_SIZE), known, c, C, BLOCK_R, ROPE_SIZE)
        cached = 0
        if TREE:
            cached = tl.load(cached_S + sequence)
        tree_row = trees_TM + token * drafts
        end = tl.minimum(begin + SPLIT, last + 1)
        if WINDOWED:
            oldest = tl.load(positions_T + first) - window + 1
            begin = tl.maximum(begin, tl.maximum(oldest, 0) // BLOCK * BLOCK)
        best, weight, out = attend_split(
            q, rotated, begin, end, position, page_table_SP + sequence * pages, chosen_TK + first * most, keys, values,
            tree_row, cached, window, scale, head, N, C, page_size, ROWS, BLOCK, BLOCK_C, ONES, WINDOWED, TREE, CHOSEN,
            ROPE_SIZE, PACKED, PRECISION, STAGES,
        )  # fmt: skip
        to = (token + number * T) * H + q_head
        tl.store(best_PTH + to, best, mask=known)
        tl.store(weight_PTH + to, weight, mask=known)
        tl.store(out_PTHC + to[:, None] * C + c[None, :], out, mask=known[:, None] & (c[None, :] < C))


@triton.jit
def combine_kernel(
    best_PTH,
    weight_PTH,
    out_PTHC,
    positions_T,
    tiles_X2,
    sinks_H,
    sums_HT,
    out_THC,
    T,
    H,
    C,
    most,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of some heads of one token, in order."""
    tile, inner = tl.program_id(0) // TOKENS, tl.program_id(0) % TOKENS
    count = tl.load(tiles_X2 + 2 * tile + 1)
    token = tl.load(tiles_X2 + 2 * tile).to(tl.int64) + inner
    position = tl.load(positions_T + token, mask=inner < count, other=-1)
    splits = (tl.minimum(position, most - 1) + SPLIT) // SPLIT
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if inner < count:
        member = tl.arange(0, HEADS)
        mine = member < GROUP
        head = tl.program_id(1) * GROUP + member
        c = tl.arange(0, BLOCK_C)
        inside = mine[:, None] & (c[None, :] < C)
        best = tl.full([HEADS], NOTHING, tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        out = tl.zeros([HEADS, BLOCK_C], tl.float32)
        for number in tl.range(0, splits, num_stages=2):
            at = (token + number * T) * H + head
            new_best = tl.load(best_PTH + at, mask=mine, other=NOTHING)
            new_weight = tl.load(weight_PTH + at, mask=mine, other=0.0)
            new_out = tl.load(out_PTHC + at[:, None] * C + c[None, :], mask=inside, other=0.0)
            best, weight, out = combined(best, weight, out, new_best, new_weight, new_out)
        if sinks_H is not None:
            weight = with_sink(weight, best, sinks_H, head, mine)
        if sums_HT is not None:
            tl.store(sums_HT + head * T + token, logarithm(best, weight), mask=mine)
        out = tl.where(weight[:, None] > 0, out / weight[:, None], 0.0)
        at = (token * H + head[:, None]) * C + c[None, :]
        tl.store(out_THC + at, out.to(out_THC.dtype.element_ty), mask=inside)


@triton.jit
def prefill_kernel(
    q_THC,
    keys,
    values,
    positions_T,
    sequences_T,
    page_table_SP,
    tiles_X2,
    sinks_H,
    sums_HT,
    chosen_TK,
    out_THC,
    T,
    H,
    N,
    C,
    pages,
    page_size,
    window,
    most,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All splits of one tile's keys, for the query heads that share one key head."""
    tile, head = tl.program_id(1), tl.program_id(0)
    first = tl.load(tiles_X2 + 2 * tile).to(tl.int64)
    count = tl.load(tiles_X2 + 2 * tile + 1)
    # A tile of no rows, which fills up a list of fixed length, has no keys either.
    last = tl.load(positions_T + tl.maximum(first + count - 1, 0), mask=count > 0, other=-1)
    if CHOSEN:
        last = tl.minimum(last, most - 1)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    known = row // GROUP < count
    position = tl.load(positions_T + token, mask=known, other=-1)
    sequence = tl.load(sequences_T + first).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    at = token * H + head * GROUP + row % GROUP
    q, rotated = queries(q_THC, at * (C + ROPE_SIZE), known, c, C, BLOCK_R, ROPE_SIZE)
    best = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_C], tl.float32)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(tl.load(positions_T + first) - window + 1, 0)
    for start in range(oldest // SPLIT * SPLIT, last + 1, SPLIT):
        begin = start
        if WINDOWED:
            begin = tl.maximum(start, oldest // BLOCK * BLOCK)
        new_best, new_weight, new_out = attend_split(
            q, rotated, begin, tl.minimum(start + SPLIT, last + 1), position, page_table_SP + sequence * pages,
            chosen_TK + first * most, keys, values, q_THC + token, 0, window, scale, head, N, C, page_size, ROWS, BLOCK,
            BLOCK_C, ONES, WINDOWED, False, CHOSEN, ROPE_SIZE, PACKED, PRECISION, STAGES,
        )  # fmt: skip
        best, weight, out = combined(best, weight, out, new_best, new_weight, new_out)
    if sinks_H is not None:
        weight = with_sink(weight, best, sinks_H, head * GROUP + row % GROUP, known)
    if sums_HT is not None:
        tl.store(sums_HT + (head * GROUP + row % GROUP) * T + token, logarithm(best, weight), mask=known)
    out = tl.where(weight[:, None] > 0, out / weight[:, None], 0.0)
    inside = known[:, None] & (c[None, :] < C)
    tl.store(out_THC + at[:, None] * C + c[None, :], out.to(out_THC.dtype.element_ty), mask=inside)
