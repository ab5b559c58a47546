"""Attention over a paged cache, the same to the bit for a token alone, in any batch, and however its prompt was cut.

Keys are split by their place in the sequence (`SPLIT` to a piece), each piece is walked in blocks of `BLOCK`, and the
pieces are added in order. With few new tokens per sequence every piece is a program of its own and a second kernel adds
them up; with many, one program walks all pieces and does the same sums. Row sums of the weights are taken by the tensor
cores too, whose order does not depend on the tile. Query heads that share a key head are rows of one tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.overlap import launch_overlapped, overlaps
from moesaic.kernels.triton.paged_rows import Rows

SPLIT = 128  # keys to a piece: 256 is 3 % faster with many sequences, and 3 % slower with one
BLOCK = 64  # keys to a step
AHEAD = 16  # with so few tiles there is time to fetch keys before they are needed
LONE = 16  # row sums are a product with this many columns of ones
NOTHING = tl.constexpr(-1e30)  # the largest score of no keys; finite, so that differences are


@triton.jit
def piece(
    q,
    begin,
    end,
    place,
    sequence_pages,
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
    LONE: tl.constexpr,
    WINDOWED: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys begin..end of one sequence: the largest score of each row, its sum of weights, its weighted values."""
    c = tl.arange(0, BLOCK_C)
    best = tl.full([ROWS], NOTHING, tl.float32)
    weights = tl.zeros([ROWS, LONE], tl.float32)
    out = tl.zeros([ROWS, BLOCK_C], tl.float32)
    ones = tl.full([BLOCK, LONE], 1.0, q.dtype)
    for base in tl.range(begin, end, BLOCK, num_stages=STAGES):
        key = base + tl.arange(0, BLOCK)
        inside = key < end
        page = tl.load(sequence_pages + key // page_size, mask=inside, other=0).to(tl.int64)
        at = ((page * page_size + key % page_size) * N + head) * C
        both = inside[:, None] & (c[None, :] < C)
        k = tl.load(keys + at[:, None] + c[None, :], mask=both, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (key[None, :] <= place[:, None]) & inside[None, :]
        if WINDOWED:
            seen = seen & (key[None, :] > place[:, None] - window)
        if TREE:
            guess = key[None, :] - cached
            allowed = tl.load(tree_row[:, None] + guess, mask=seen & (guess >= 0), other=1)
            seen = seen & (allowed != 0)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - new)
        p = tl.exp2(scores - new[:, None]).to(q.dtype)
        best = new
        v = tl.load(values + at[:, None] + c[None, :], mask=both, other=0.0).to(q.dtype)
        weights = tl.dot(p, ones, weights * shrink[:, None], input_precision=PRECISION)
        out = tl.dot(p, v, out * shrink[:, None], input_precision=PRECISION)
    return best, tl.max(weights, 1), out


@triton.jit
def bring_closer(begin, last, sequence_pages, keys, values, head, N, C, page_size, SPLIT: tl.constexpr):
    """Nearly all keys and values are old: have a piece of them read into the L2 cache while the newest are made."""
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
def added(best, weight, out, new_best, new_weight, new_out):
    """Two pieces as one. Products and sums are spelled out, so that no compiler joins them one way here and another way
    there."""
    top = tl.maximum(best, new_best)
    old_share = tl.exp2(best - top)
    new_share = tl.exp2(new_best - top)
    weight = tl.fma(weight, old_share, new_weight * new_share)
    out = tl.fma(out, old_share[:, None], new_out * new_share[:, None])
    return top, weight, out


@triton.jit
def few_kernel(
    q_THC,
    keys,
    values,
    places_T,
    sequences_T,
    table_SP,
    tiles_X2,
    trees_TM,
    cached_S,
    best_PTH,
    weight_PTH,
    out_PTHC,
    T,
    H,
    N,
    C,
    pages,
    page_size,
    guesses,
    window,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LONE: tl.constexpr,
    WINDOWED: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One piece of one tile's keys, for the query heads that share one key head."""
    tile, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles_X2 + 2 * tile).to(tl.int64)
    count = tl.load(tiles_X2 + 2 * tile + 1)
    last = tl.load(places_T + first + count - 1)
    sequence = tl.load(sequences_T + first).to(tl.int64)
    begin = number * SPLIT
    if OVERLAP:  # where tokens stand was known before the forward began; keys and queries were not
        gdc_launch_dependents()
        if AHEAD:
            bring_closer(
                begin, last, table_SP + sequence * pages, keys, values, head, N, C, page_size, SPLIT
            )  # fmt: skip
        gdc_wait()
    if begin <= last:
        row = tl.arange(0, ROWS)
        token = first + row // GROUP
        known = row // GROUP < count
        place = tl.load(places_T + token, mask=known, other=-1)
        c = tl.arange(0, BLOCK_C)
        q_head = head * GROUP + row % GROUP
        at = (token * H + q_head) * C
        q = tl.load(q_THC + at[:, None] + c[None, :], mask=known[:, None] & (c[None, :] < C), other=0.0)
        cached = 0
        if TREE:
            cached = tl.load(cached_S + sequence)
        tree_row = trees_TM + token * guesses
        end = tl.minimum(begin + SPLIT, last + 1)
        if WINDOWED:
            oldest = tl.load(places_T + first) - window + 1
            begin = tl.maximum(begin, tl.maximum(oldest, 0) // BLOCK * BLOCK)
        best, weight, out = piece(
            q, begin, end, place, table_SP + sequence * pages, keys, values, tree_row, cached, window, scale, head,
            N, C, page_size, ROWS, BLOCK, BLOCK_C, LONE, WINDOWED, TREE, PRECISION, STAGES,
        )  # fmt: skip
        to = (token + number * T) * H + q_head
        tl.store(best_PTH + to, best, mask=known)
        tl.store(weight_PTH + to, weight, mask=known)
        tl.store(out_PTHC + to[:, None] * C + c[None, :], out, mask=known[:, None] & (c[None, :] < C))


@triton.jit
def add_kernel(
    best_PTH,
    weight_PTH,
    out_PTHC,
    places_T,
    tiles_X2,
    out_THC,
    T,
    H,
    C,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The pieces of some heads of one token, in order."""
    tile, inner = tl.program_id(0) // TOKENS, tl.program_id(0) % TOKENS
    count = tl.load(tiles_X2 + 2 * tile + 1)
    token = tl.load(tiles_X2 + 2 * tile).to(tl.int64) + inner
    pieces = (tl.load(places_T + token, mask=inner < count, other=-1) + SPLIT) // SPLIT
    if OVERLAP:
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
        for number in tl.range(0, pieces, num_stages=2):
            at = (token + number * T) * H + head
            new_best = tl.load(best_PTH + at, mask=mine, other=NOTHING)
            new_weight = tl.load(weight_PTH + at, mask=mine, other=0.0)
            new_out = tl.load(out_PTHC + at[:, None] * C + c[None, :], mask=inside, other=0.0)
            best, weight, out = added(best, weight, out, new_best, new_weight, new_out)
        out = tl.where(weight[:, None] > 0, out / weight[:, None], 0.0)
        at = (token * H + head[:, None]) * C + c[None, :]
        tl.store(out_THC + at, out.to(out_THC.dtype.element_ty), mask=inside)


@triton.jit
def many_kernel(
    q_THC,
    keys,
    values,
    places_T,
    sequences_T,
    table_SP,
    tiles_X2,
    out_THC,
    H,
    N,
    C,
    pages,
    page_size,
    window,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LONE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All pieces of one tile's keys, for the query heads that share one key head."""
    tile, head = tl.program_id(1), tl.program_id(0)
    first = tl.load(tiles_X2 + 2 * tile).to(tl.int64)
    count = tl.load(tiles_X2 + 2 * tile + 1)
    # A tile of no rows, which fills up a list of fixed length, has no keys either.
    last = tl.load(places_T + tl.maximum(first + count - 1, 0), mask=count > 0, other=-1)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    known = row // GROUP < count
    place = tl.load(places_T + token, mask=known, other=-1)
    sequence = tl.load(sequences_T + first).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    at = (token * H + head * GROUP + row % GROUP) * C
    inside = known[:, None] & (c[None, :] < C)
    q = tl.load(q_THC + at[:, None] + c[None, :], mask=inside, other=0.0)
    best = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_C], tl.float32)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(tl.load(places_T + first) - window + 1, 0)
    for start in range(oldest // SPLIT * SPLIT, last + 1, SPLIT):
        begin = start
        if WINDOWED:
            begin = tl.maximum(start, oldest // BLOCK * BLOCK)
        new_best, new_weight, new_out = piece(
            q, begin, tl.minimum(start + SPLIT, last + 1), place, table_SP + sequence * pages, keys, values,
            q_THC + token, 0, window, scale, head, N, C, page_size, ROWS, BLOCK, BLOCK_C, LONE, WINDOWED, False,
            PRECISION, STAGES,
        )  # fmt: skip
        best, weight, out = added(best, weight, out, new_best, new_weight, new_out)
    out = tl.where(weight[:, None] > 0, out / weight[:, None], 0.0)
    tl.store(out_THC + at[:, None] + c[None, :], out.to(out_THC.dtype.element_ty), mask=inside)


def attend(
    q_THC: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Every token attends to its sequence up to itself; keys and values are slabs (pages, page size, N, C)."""
    T, H, C = q_THC.shape
    page_size, N = keys.shape[1], keys.shape[2]
    group = H // N
    q_THC = q_THC.contiguous()
    out_THC = torch.empty_like(q_THC)
    wide = q_THC.dtype == torch.float32
    shape = {
        "GROUP": group,
        "SPLIT": SPLIT,
        "BLOCK": BLOCK,
        "BLOCK_C": max(16, triton.next_power_of_2(C)),
        "LONE": LONE,
        "WINDOWED": window is not None,
        "PRECISION": "ieee" if wide else "tf32",
        "STAGES": 1 if wide else 2,
    }
    per_base = scale * 1.4426950408889634  # weights are powers of two
    pages, seen = rows.table_SP.shape[1], window or 0
    if rows.few_X2 is not None:
        tiles, pieces = rows.few_X2.shape[0], triton.cdiv(rows.longest, SPLIT)
        overlap = rows.early and overlaps(q_THC.device)
        best_PTH = torch.empty(pieces, T, H, dtype=torch.float32, device=q_THC.device)
        weight_PTH = torch.empty_like(best_PTH)
        out_PTHC = torch.empty(pieces, T, H, C, dtype=torch.float32, device=q_THC.device)
        trees = rows.trees_TM is not None
        launch_overlapped(
            few_kernel,
            (tiles, N, pieces),
            q_THC,
            keys,
            values,
            rows.places_T,
            rows.sequences_T,
            rows.table_SP,
            rows.few_X2,
            rows.trees_TM if trees else q_THC,
            rows.cached_S if trees else rows.places_T,
            best_PTH,
            weight_PTH,
            out_PTHC,
            T,
            H,
            N,
            C,
            pages,
            page_size,
            rows.trees_TM.shape[1] if rows.trees_TM is not None else 0,
            seen,
            per_base,
            ROWS=max(16, triton.next_power_of_2(rows.few_tokens * group)),
            TREE=trees,
            AHEAD=tiles <= AHEAD,
            OVERLAP=overlap,
            num_warps=4,
            **shape,
        )
        launch_overlapped(
            add_kernel,
            (tiles * rows.few_tokens, N),
            best_PTH,
            weight_PTH,
            out_PTHC,
            rows.places_T,
            rows.few_X2,
            out_THC,
            T,
            H,
            C,
            GROUP=group,
            HEADS=triton.next_power_of_2(group),
            TOKENS=rows.few_tokens,
            SPLIT=SPLIT,
            BLOCK_C=shape["BLOCK_C"],
            OVERLAP=overlap,
            num_warps=4,
        )
    if rows.many_X2 is not None:
        many_kernel[(N, rows.many_X2.shape[0])](
            q_THC,
            keys,
            values,
            rows.places_T,
            rows.sequences_T,
            rows.table_SP,
            rows.many_X2,
            out_THC,
            H,
            N,
            C,
            pages,
            page_size,
            seen,
            per_base,
            ROWS=max(16, triton.next_power_of_2(rows.many_tokens * group)),
            num_warps=4,
            **shape,
        )
    return out_THC
