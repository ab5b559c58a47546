"""Attention in latent space on Hopper: two warpgroups share a token's latents, all of them or those an indexer chose.

64 heads are what the tensor cores multiply at once, and half a thousand sums for each fill the registers of two
warpgroups: each has a half of the keys of a score matmul and a half of the values' numbers of the other. Latents go
from the cache to shared memory row by row, those of the next step while this one is multiplied, and are key and value
where they lie.

Keys are split by how many a token attends to, and splits are joined in order: by a second kernel where tokens are few,
else by the program that walks them all, with the same sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.attention.paged_kernels import NOTHING, combined
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.dependent_launch import is_hopper, launch_pdl, processors, supports_pdl
from moesaic.kernels.triton.experts.hopper.copies import row_load

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

HEADS, LATENT, ROTATED = gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)  # of a program; numbers of a key's parts
BLOCK = gl.constexpr(64)  # keys to a step
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
OF_SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
OF_VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]))
SPLIT = 256  # keys of a split, where a token attends to no more than eight times as many
SCRATCH = 256 << 20  # bytes of splits at a time
FEW = 64  # tokens
NO_LIMIT = 1 << 30  # of what a token attends to


def split_size(end, SPLIT):
    """Of a token that attends to so many keys: short contexts want many programs, long ones few sums to join."""
    return SPLIT * (1 + (end > 8 * SPLIT)) * (1 + (end > 32 * SPLIT)) * (1 + (end > 128 * SPLIT))


split_here, split_there = gluon.jit(split_size), triton.jit(split_size)


def most_splits(length: int, split: int = SPLIT) -> int:
    """Of any token of a sequence of this length."""
    ends = [length, *(end * split for end in (8, 32, 128) if end * split < length)]
    return max(triton.cdiv(end, split_size(end, split)) for end in ends)


@gluon.jit
def slot_of(where, number, known, page_size, CHOSEN: gl.constexpr):
    """Where in the cache a key lies: as its token's row of what was chosen says, or its sequence's pages."""
    if CHOSEN:
        slot = gl.load(where + number, mask=known, other=0)
    else:
        slot = gl.load(where + number // page_size, mask=known, other=0) * page_size + number % page_size
    return slot


@gluon.jit
def fetch(plain, rotated, latents, slot, known):
    """Rows of the cache; zeros where there is none."""
    row = latents + slot.to(gl.int64) * (LATENT + ROTATED)
    c = gl.arange(0, LATENT, gl.SliceLayout(0, COPIED))
    r = gl.arange(0, ROTATED, gl.SliceLayout(0, COPIED))
    row_load(plain, row[:, None] + c[None, :], mask=known[:, None])
    row_load(rotated, row[:, None] + (LATENT + r)[None, :], mask=known[:, None])


@gluon.jit
def shared_memory(kind: gl.constexpr):
    """Queries, two blocks of keys, and weights: 224 KiB of a processor's 227."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(kind, [HEADS, LATENT], swizzled)
    queries_rotated = gl.allocate_shared_memory(kind, [HEADS, ROTATED], swizzled)
    keys = gl.allocate_shared_memory(kind, [2, BLOCK, LATENT], swizzled)
    keys_rotated = gl.allocate_shared_memory(kind, [2, BLOCK, ROTATED], swizzled)
    shares = gl.allocate_shared_memory(kind, [HEADS, BLOCK], swizzled)
    return queries, queries_rotated, keys, keys_rotated, shares


@gluon.jit
def attend_range(
    q_THX, latents, where, token, first_head, begin, end, H, page_size, scale, shared, CHOSEN: gl.constexpr
):
    """Some heads of one token and some of its keys: the largest score, the sum of weights, weighed values."""
    queries, queries_rotated, keys, keys_rotated, shares = shared
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, COPIED))
    number = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, COPIED))
    slot = slot_of(where, number, number < end, page_size, CHOSEN)
    fetch(queries, queries_rotated, q_THX, token * H + head, head < H)
    fetch(keys.index(0), keys_rotated.index(0), latents, slot, number < end)
    async_copy.commit_group()
    slot = slot_of(where, BLOCK + number, BLOCK + number < end, page_size, CHOSEN)
    best = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, OF_SCORES))
    weight = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, OF_SCORES))
    out = gl.zeros([HEADS, LATENT], gl.float32, OF_VALUES)
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, OF_SCORES))
    for base in range(begin, end, BLOCK):
        stage = (base - begin) // BLOCK % 2
        number += BLOCK
        fetch(keys.index(1 - stage), keys_rotated.index(1 - stage), latents, slot, number < end)
        async_copy.commit_group()
        slot = slot_of(where, BLOCK + number, BLOCK + number < end, page_size, CHOSEN)
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        scores = gl.zeros([HEADS, BLOCK], gl.float32, OF_SCORES)
        scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(queries_rotated, keys_rotated.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        scores = gl.where((base + column < end)[None, :], scores * scale, float("-inf"))
        new = gl.maximum(best, gl.max(scores, 1))
        shrink = gl.exp2(best - new)
        each = gl.exp2(scores - new[:, None])
        weight = gl.fma(weight, shrink, gl.sum(each, 1))
        best = new
        shares.store(each.to(q_THX.dtype.element_ty))
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OF_VALUES))[:, None]
        fence_async_shared()
        barrier()
        out = warpgroup_mma(shares, keys.index(stage), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        barrier()  # all have read what is overwritten now
    async_copy.wait_group(0)
    return best, weight, out


@gluon.jit
def store_heads(out_THC, row, out, weight):
    """Some heads of one token, beginning at a row of LATENT numbers; weighed values over the sums of weights."""
    out = out / gl.convert_layout(weight, gl.SliceLayout(1, OF_VALUES))[:, None]
    gl.store(places(out_THC, row), out.to(out_THC.dtype.element_ty))


@gluon.jit
def places(first, row):
    """Pointers to some heads' values."""
    own = gl.arange(0, HEADS, gl.SliceLayout(1, OF_VALUES))
    c = gl.arange(0, LATENT, gl.SliceLayout(0, OF_VALUES))
    return first + ((row + own) * LATENT)[:, None] + c[None, :]


@gluon.jit
def keys_of(chosen_TK, page_table_SP, sequences_T, token, most, pages, CHOSEN: gl.constexpr):
    """What `slot_of` reads of a token."""
    if CHOSEN:
        where = chosen_TK + token * most
    else:
        where = page_table_SP + gl.load(sequences_T + token).to(gl.int64) * pages
    return where


@gluon.jit
def split_kernel(
    q_THX,
    latents,
    chosen_TK,
    positions_T,
    sequences_T,
    page_table_SP,
    tiles_X2,
    best_PXH,
    weight_PXH,
    out_PXHC,
    first_tile,
    X,
    H,
    most,
    pages,
    page_size,
    scale,
    SPLIT: gl.constexpr,
    CHOSEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """Some heads of one token, which is a tile, and a split of its keys."""
    tile = gl.program_id(1)
    token = gl.load(tiles_X2 + 2 * (first_tile + tile)).to(gl.int64)
    count = gl.load(tiles_X2 + 2 * (first_tile + tile) + 1)
    end = gl.minimum(gl.load(positions_T + token) + 1, most)
    size = split_here(end, SPLIT)
    begin = gl.program_id(2) * size
    where = keys_of(chosen_TK, page_table_SP, sequences_T, token, most, pages, CHOSEN)
    if PDL:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    if (count > 0) & (begin < end):
        first_head = gl.program_id(0) * HEADS
        shared = shared_memory(q_THX.dtype.element_ty)
        best, weight, out = attend_range(
            q_THX, latents, where, token, first_head, begin, gl.minimum(begin + size, end), H, page_size, scale, shared,
            CHOSEN,
        )  # fmt: skip
        row = (gl.program_id(2) * X + tile).to(gl.int64) * H + first_head
        head = gl.arange(0, HEADS, gl.SliceLayout(1, OF_SCORES))
        gl.store(best_PXH + row + head, best)
        gl.store(weight_PXH + row + head, weight)
        gl.store(places(out_PXHC, row), out)


@triton.jit
def join_kernel(
    best_PXH,
    weight_PXH,
    out_PXHC,
    positions_T,
    tiles_X2,
    out_THC,
    first_tile,
    X,
    H,
    most,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of some heads of one token, in order."""
    tile = tl.program_id(0)
    token = tl.load(tiles_X2 + 2 * (first_tile + tile)).to(tl.int64)
    count = tl.load(tiles_X2 + 2 * (first_tile + tile) + 1)
    end = tl.minimum(tl.load(positions_T + token) + 1, most)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if count > 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        c = tl.arange(0, LATENT)
        best = tl.full([HEADS], NOTHING, tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        out = tl.zeros([HEADS, LATENT], tl.float32)
        for number in tl.range(0, tl.cdiv(end, split_there(end, SPLIT)), num_stages=3):
            at = (number * X + tile).to(tl.int64) * H + head
            new_out = tl.load(out_PXHC + at[:, None] * LATENT + c[None, :])
            best, weight, out = combined(
                best, weight, out, tl.load(best_PXH + at), tl.load(weight_PXH + at), new_out
            )  # fmt: skip
        out = tl.where(weight[:, None] > 0, out / weight[:, None], 0.0)
        tl.store(out_THC + (token * H + head[:, None]) * LATENT + c[None, :], out.to(out_THC.dtype.element_ty))


@gluon.jit
def whole_kernel(
    q_THX,
    latents,
    chosen_TK,
    positions_T,
    sequences_T,
    page_table_SP,
    tiles_X2,
    total_GHC,
    out_THC,
    X,
    H,
    most,
    pages,
    page_size,
    scale,
    SPLIT: gl.constexpr,
    CHOSEN: gl.constexpr,
):
    """As many programs as there are processors: some heads of one token, then of another, each with all splits. The sum
    of those so far waits in memory: registers hold that of one."""
    groups = H // HEADS
    shared = shared_memory(q_THX.dtype.element_ty)
    so_far = places(total_GHC, gl.program_id(0) * HEADS)
    for work in range(gl.program_id(0), X * groups, gl.num_programs(0)):
        tile = X - 1 - work // groups  # a prompt's last tokens have most to do
        first_head = work % groups * HEADS
        token = gl.load(tiles_X2 + 2 * tile).to(gl.int64)
        end = gl.minimum(gl.load(positions_T + token) + 1, most)
        end = gl.where(gl.load(tiles_X2 + 2 * tile + 1) > 0, end, 0)
        size = split_here(end, SPLIT)
        where = keys_of(chosen_TK, page_table_SP, sequences_T, token, most, pages, CHOSEN)
        best = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, OF_SCORES))
        weight = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, OF_SCORES))
        for begin in range(0, end, size):
            new_best, new_weight, out = attend_range(
                q_THX, latents, where, token, first_head, begin, gl.minimum(begin + size, end), H, page_size, scale,
                shared, CHOSEN,
            )  # fmt: skip
            top = gl.maximum(best, new_best)
            old_share, new_share = gl.exp2(best - top), gl.exp2(new_best - top)
            best, weight = top, gl.fma(weight, old_share, new_weight * new_share)
            if begin > 0:
                old = gl.convert_layout(old_share, gl.SliceLayout(1, OF_VALUES))
                more = gl.convert_layout(new_share, gl.SliceLayout(1, OF_VALUES))
                out = gl.fma(gl.load(so_far), old[:, None], out * more[:, None])
            if begin + size < end:
                gl.store(so_far, out)
            else:
                store_heads(out_THC, token * H + first_head, out, weight)


def takes(q_THX: torch.Tensor, latents: torch.Tensor, rope_size: int) -> bool:
    heads, latent = q_THX.shape[1], q_THX.shape[2] - rope_size
    sizes = latent == LATENT.value and rope_size == ROTATED.value and heads % HEADS.value == 0
    return sizes and q_THX.dtype == latents.dtype == torch.bfloat16 and is_hopper(q_THX.device)


def attend_tiles(
    q_THX: torch.Tensor,
    latents: torch.Tensor,
    rows: Rows,
    scale: float,
    out_THC: torch.Tensor,
    chosen_TK: torch.Tensor | None = None,
    split: int = SPLIT,
) -> None:
    """Tiles of one token each; a token's bits are the same in any step, whichever kernels do it."""
    H, most = out_THC.shape[1], NO_LIMIT if chosen_TK is None else chosen_TK.shape[1]
    chosen = q_THX if chosen_TK is None else chosen_TK
    around = (q_THX, latents, chosen, rows.positions_T, rows.sequences_T, rows.page_table_SP)
    sizes = (H, most, rows.page_table_SP.shape[1], latents.shape[1], scale * 1.4426950408889634)  # powers of two
    for tiles_X2 in (rows.decode_X2, rows.prefill_X2):
        if tiles_X2 is None:
            continue
        if tiles_X2 is rows.decode_X2 or (chosen_TK is not None and len(tiles_X2) <= FEW):
            _in_splits(around, sizes, tiles_X2, rows, out_THC, chosen_TK is not None, split)
            continue
        tiles = len(tiles_X2)
        programs = min(tiles * (H // HEADS.value), processors(q_THX.device))
        total_GHC = torch.empty(programs, HEADS.value, LATENT.value, dtype=torch.float32, device=q_THX.device)
        whole_kernel[(programs,)](
            *around, tiles_X2, total_GHC, out_THC, tiles, *sizes, SPLIT=split, CHOSEN=chosen_TK is not None, num_warps=8
        )


def _in_splits(
    around: tuple[torch.Tensor, ...],
    sizes: tuple[float, ...],
    tiles_X2: torch.Tensor,
    rows: Rows,
    out_THC: torch.Tensor,
    is_chosen: bool,
    split: int,
) -> None:
    """As many tiles at a time as there is room for the splits of."""
    _, H, C = out_THC.shape
    splits = most_splits(min(rows.max_length, int(sizes[1])), split)
    several = min(len(tiles_X2), max(1, SCRATCH // (splits * H * C * 4)))
    best_PXH = torch.empty(splits, several, H, dtype=torch.float32, device=out_THC.device)
    weight_PXH = torch.empty_like(best_PXH)
    out_PXHC = torch.empty(splits, several, H, C, dtype=torch.float32, device=out_THC.device)
    overlap = rows.read_before_wait and supports_pdl(out_THC.device)
    parts = (best_PXH, weight_PXH, out_PXHC)
    for first in range(0, len(tiles_X2), several):
        count = min(several, len(tiles_X2) - first)
        launch_pdl(
            split_kernel,
            (H // HEADS.value, count, splits),
            *around,
            tiles_X2,
            *parts,
            first,
            several,
            *sizes,
            SPLIT=split,
            CHOSEN=is_chosen,
            PDL=overlap,
            num_warps=8,
        )
        launch_pdl(
            join_kernel,
            (count, H // 4),
            *parts,
            rows.positions_T,
            tiles_X2,
            out_THC,
            first,
            several,
            H,
            sizes[1],
            SPLIT=split,
            HEADS=4,
            LATENT=C,
            PDL=overlap,
            num_warps=4,
        )
