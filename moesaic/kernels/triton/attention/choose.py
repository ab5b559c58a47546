"""DSA's choice on the device: light heads score all earlier tokens of a sequence, and each token keeps the best.

A score is a matmul over a key's numbers, whose rectified results are added over heads, in an order that depends on
nothing but the sizes of the indexer. The smallest of the topk largest is found bit by bit, and of equal ones the
earliest win: what a token keeps depends on itself and the keys before it alone. Nothing is sorted and nothing waits for
the host. Scores are of so many rows at a time as fit into SCRATCH; what is kept of them is where the tokens lie in the
cache, in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.attention.prompt_rows import MASKED
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

KEYS = 256  # keys of a program that scores
SCRATCH = 128 << 20  # bytes of scores at a time
MOST = 32768  # scores of a row that stay in registers while they are counted again and again
PART = 4096  # scores that are put in their places at a time


@triton.jit
def score_kernel(
    q_THC,
    weights_TH,
    keys,
    positions_T,
    sequences_T,
    page_table_SP,
    tiles_X2,
    scores_RM,
    first_row,
    rows,
    topk,
    H,
    C,
    pages,
    page_size,
    width,
    share,
    scale,
    KEYS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some keys of one sequence, scored by those tokens of a tile that are among the rows."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    first = tl.load(tiles_X2 + 2 * tile)
    begin = tl.maximum(first, first_row)
    end = tl.minimum(first + tl.load(tiles_X2 + 2 * tile + 1), first_row + rows)
    last = tl.load(positions_T + tl.maximum(end - 1, 0), mask=begin < end, other=-1)
    sequence = tl.load(sequences_T + tl.maximum(end - 1, 0)).to(tl.int64)
    key = block * KEYS + tl.arange(0, KEYS)
    if PDL:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    if (last >= topk) & (block * KEYS <= last):  # else they keep all there is, or see none of these
        c = tl.arange(0, BLOCK_C)
        h = tl.arange(0, BLOCK_H)
        seen = key <= last
        page = tl.load(page_table_SP + sequence * pages + key // page_size, mask=seen, other=0).to(tl.int64)
        at = (page * page_size + key % page_size) * C
        inside = (h < H)[:, None] & (c < C)[None, :]
        k = tl.load(keys + at[:, None] + c[None, :], mask=seen[:, None] & (c < C)[None, :], other=0.0)
        k = k.to(q_THC.dtype.element_ty)
        for row in tl.range(begin, end, 1, num_stages=STAGES):
            of = row * H
            q = tl.load(q_THC + (of + h)[:, None] * C + c[None, :], mask=inside, other=0.0)
            weight = tl.load(weights_TH + of + h, mask=h < H, other=0.0).to(tl.float32) * share * scale
            each = tl.maximum(tl.dot(k, tl.trans(q), input_precision=PRECISION), 0.0)
            total = tl.sum(each * weight[None, :], 1)
            tl.store(scores_RM + (row - first_row) * width + key, total, mask=seen)


@triton.jit
def in_order(scores, key, total):
    """Scores as numbers whose order without a sign is that of the floats; both zeros are one, and none is 0."""
    score = tl.load(scores + key, mask=key < total, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    number = (bits ^ tl.where(bits < 0, -1, -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(key < total, number, 0)


@triton.jit
def count_from(scores, numbers, least, total, BLOCK: tl.constexpr, PART: tl.constexpr, ONE: tl.constexpr):
    """How many are no smaller; beyond a block, a part at a time: a row that just outgrew it reads little again."""
    count = tl.sum((numbers >= least).to(tl.int32), 0)
    if not ONE:
        for base in tl.range(BLOCK, total, PART):
            more = in_order(scores, base + tl.arange(0, PART), total)
            count += tl.sum((more >= least).to(tl.int32), 0)
    return count


@triton.jit
def slot_of(table, key, page_size, known, PLACES: tl.constexpr):
    """Where a token of a sequence lies in the cache; or its place in the sequence."""
    slot = key
    if not PLACES:
        slot = tl.load(table + key // page_size, mask=known, other=0) * page_size + key % page_size
    return slot


@triton.jit
def choose_kernel(
    scores_RM,
    positions_T,
    sequences_T,
    page_table_SP,
    kinds_T,
    chosen_TK,
    bits_TW,
    first_row,
    topk,
    pages,
    page_size,
    width,
    words,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where the tokens lie in the cache that one token attends to; or a bit for each token, whether it does."""
    token = first_row + tl.program_id(0).to(tl.int64)
    position = tl.load(positions_T + token)
    table = page_table_SP + tl.load(sequences_T + token).to(tl.int64) * pages
    chosen = chosen_TK + token * topk
    total = position + 1
    if bits_TW is not None:
        as_bits = tl.load(kinds_T + token) == 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if total <= topk:
        for base in tl.range(0, total, PART):
            key = base + tl.arange(0, PART)
            tl.store(chosen + key, slot_of(table, key, page_size, key < total, PLACES), mask=key < total)
    else:
        scores = scores_RM + tl.program_id(0).to(tl.int64) * width
        numbers = in_order(scores, tl.arange(0, BLOCK), total)  # all of them, where there are no more
        least = tl.full([], 0, tl.uint32)  # what is kept is no smaller
        reached = total  # so many are not
        for step in range(32):  # bit by bit, until those are as many as are wanted
            if reached > topk:
                candidate = least | (tl.full([], 1, tl.uint32) << (31 - step))
                count = count_from(scores, numbers, candidate, total, BLOCK, PART, ONE)
                if count >= topk:
                    least = candidate
                    reached = count
        larger_ones = count_from(scores, numbers, least + 1, total, BLOCK, PART, ONE)
        wanted = topk - larger_ones  # of those that are equal to the least
        larger = 0  # so far; and how many as large as the least
        equal = 0
        for base in tl.range(0, total, PART):
            key = base + tl.arange(0, PART)
            number = in_order(scores, key, total)
            is_larger = (key < total) & (number > least)
            is_equal = (key < total) & (number == least)
            both = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
            up_to = tl.cumsum(both, 0)
            equals = equal + (up_to >> 16)
            place = larger + (up_to & 0xFFFF) + tl.minimum(equals, wanted) - 1
            kept = is_larger | (is_equal & (equals <= wanted))
            if bits_TW is not None:
                each = tl.reshape(kept.to(tl.int32), [PART // 32, 32]) << tl.arange(0, 32)[None, :]
                word = base // 32 + tl.arange(0, PART // 32)
                tl.store(bits_TW + token * words + word, tl.sum(each, 1), mask=as_bits & (word < words))
                kept = kept & (as_bits == 0)
            tl.store(chosen + place, slot_of(table, key, page_size, kept, PLACES), mask=kept & (place < topk))
            sums = tl.sum(both, 0)
            larger += sums & 0xFFFF
            equal += sums >> 16


class Chosen(NamedTuple):
    """`slots_TK` says where in a cache with pages of one token the tokens would lie that each row attends to, in their
    order, and as many as there are: no more than K. Rows that attend to expanded latents have bits instead, one for
    each token; what they see without a choice, they all attend to."""

    slots_TK: torch.Tensor  # int32
    bits_TW: torch.Tensor | None  # int32


def choose(
    q_THC: torch.Tensor | None,
    weights_TH: torch.Tensor | None,
    keys: torch.Tensor,
    rows: Rows,
    topk: int,
    share: float | None = None,
    places: bool = False,
) -> Chosen:
    """Without queries every row attends to all there is. `share` is what the weights of heads are multiplied with, if
    they are not yet; with `places`, slots are places in a sequence."""
    T = len(rows.positions_T)
    slots_TK = torch.empty(T, topk, dtype=torch.int32, device=keys.device)
    bits_TW = None
    if q_THC is not None and rows.prompts is not None:
        words = triton.cdiv(min(rows.max_length, MASKED * topk), 32)
        bits_TW = torch.empty(T, words, dtype=torch.int32, device=keys.device)
    overlap = rows.read_before_wait and supports_pdl(keys.device)
    page_size, pages = keys.shape[1], rows.page_table_SP.shape[1]
    width = triton.cdiv(rows.max_length, 16) * 16
    several, scores_RM = T, keys
    if q_THC is not None:
        several = min(T, max(16, SCRATCH // (4 * width)))
        scores_RM = torch.empty(several, width, dtype=torch.float32, device=keys.device)
    for first in range(0, T, several):
        count = min(several, T - first)
        if q_THC is not None and weights_TH is not None and rows.index_X2 is not None:
            _, H, C = q_THC.shape
            wide = q_THC.dtype == torch.float32
            own = 32 if wide else KEYS
            launch_pdl(
                score_kernel,
                (triton.cdiv(rows.max_length, own), len(rows.index_X2)),
                q_THC,
                weights_TH,
                keys,
                rows.positions_T,
                rows.sequences_T,
                rows.page_table_SP,
                rows.index_X2,
                scores_RM,
                first,
                count,
                topk,
                H,
                C,
                pages,
                page_size,
                width,
                H**-0.5 if share is None else share,
                C**-0.5,
                KEYS=own,
                BLOCK_H=max(16, triton.next_power_of_2(H)),
                BLOCK_C=max(16, triton.next_power_of_2(C)),
                STAGES=1 if wide else 3,
                PRECISION="ieee" if wide else "tf32",
                PDL=overlap,
                num_warps=4 if wide else 8,
            )
        block = max(32, min(triton.next_power_of_2(rows.max_length), MOST))
        launch_pdl(
            choose_kernel,
            (count,),
            scores_RM,
            rows.positions_T,
            rows.sequences_T,
            rows.page_table_SP,
            None if bits_TW is None else rows.kinds_T,
            slots_TK,
            bits_TW,
            first,
            topk,
            pages,
            page_size,
            width,
            0 if bits_TW is None else bits_TW.shape[1],
            PLACES=places,
            BLOCK=block,
            PART=min(block, PART),
            ONE=rows.max_length <= block,
            PDL=overlap,
            num_warps=max(4, min(32 if count <= 64 else 16, block // 512)),
        )
    return Chosen(slots_TK, bits_TW)
