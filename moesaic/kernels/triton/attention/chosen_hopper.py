"""Attention to what an indexer chose (`choose.py`), in latent space on Hopper: two warpgroups share a token's latents.

64 heads are what the tensor cores multiply at once, and half a thousand sums for each fill the registers of two
warpgroups: each has a half of the keys of a score matmul and a half of the values' numbers of the other. Latents go
from the cache to shared memory row by row, those of the next step while this one is multiplied, and are key and value
where they lie.
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
from moesaic.kernels.triton.attention.prompt_rows import CHOOSING
from moesaic.kernels.triton.dependent_launch import is_hopper, launch_pdl, supports_pdl
from moesaic.kernels.triton.experts.hopper.copies import row_load

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

HEADS, LATENT, ROTATED = 64, 512, 64  # of a program; numbers of a latent, and of the key beside it
BLOCK = 64  # keys to a step
SPLIT = 256  # keys of a program, where tokens are few
TILES = 64  # of one token, at a time: their splits take up to 2 MiB each


@gluon.jit
def fetch(plain, rotated, latents, slot, known, LATENT: gl.constexpr, ROTATED: gl.constexpr, layout: gl.constexpr):
    """Rows of the cache; zeros where there is none."""
    row = latents + slot.to(gl.int64) * (LATENT + ROTATED)
    c = gl.arange(0, LATENT, gl.SliceLayout(0, layout))
    r = gl.arange(0, ROTATED, gl.SliceLayout(0, layout))
    row_load(plain, row[:, None] + c[None, :], mask=known[:, None])
    row_load(rotated, row[:, None] + (LATENT + r)[None, :], mask=known[:, None])


@gluon.jit
def attend_range(
    q_THX,
    latents,
    chosen,
    token,
    begin,
    end,
    H,
    scale,
    HEADS: gl.constexpr,
    LATENT: gl.constexpr,
    ROTATED: gl.constexpr,
    BLOCK: gl.constexpr,
    of_scores: gl.constexpr,
    of_values: gl.constexpr,
):
    """Some heads of one token and some of what was chosen: the largest score, the sum of weights, weighed values."""
    kind: gl.constexpr = q_THX.dtype.element_ty
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(kind, [HEADS, LATENT], swizzled)
    queries_rotated = gl.allocate_shared_memory(kind, [HEADS, ROTATED], swizzled)
    keys = gl.allocate_shared_memory(kind, [2, BLOCK, LATENT], swizzled)
    keys_rotated = gl.allocate_shared_memory(kind, [2, BLOCK, ROTATED], swizzled)
    shares = gl.allocate_shared_memory(kind, [HEADS, BLOCK], swizzled)
    head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, copied))
    number = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, copied))
    slot = gl.load(chosen + number, mask=number < end, other=0)
    fetch(queries, queries_rotated, q_THX, token * H + head, head < H, LATENT, ROTATED, copied)
    fetch(keys.index(0), keys_rotated.index(0), latents, slot, number < end, LATENT, ROTATED, copied)
    async_copy.commit_group()
    slot = gl.load(chosen + BLOCK + number, mask=BLOCK + number < end, other=0)
    best = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, of_scores))
    weight = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, of_scores))
    out = gl.zeros([HEADS, LATENT], gl.float32, of_values)
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
    for base in range(begin, end, BLOCK):
        stage = (base - begin) // BLOCK % 2
        number += BLOCK
        fetch(
            keys.index(1 - stage), keys_rotated.index(1 - stage), latents, slot, number < end, LATENT, ROTATED, copied
        )  # fmt: skip
        async_copy.commit_group()
        slot = gl.load(chosen + BLOCK + number, mask=BLOCK + number < end, other=0)
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        scores = gl.zeros([HEADS, BLOCK], gl.float32, of_scores)
        scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(queries_rotated, keys_rotated.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        scores = gl.where((base + column < end)[None, :], scores * scale, float("-inf"))
        new = gl.maximum(best, gl.max(scores, 1))
        shrink = gl.exp2(best - new)
        each = gl.exp2(scores - new[:, None])
        weight = gl.fma(weight, shrink, gl.sum(each, 1))
        best = new
        shares.store(each.to(kind))
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, of_values))[:, None]
        fence_async_shared()
        barrier()
        out = warpgroup_mma(shares, keys.index(stage), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        barrier()  # all have read what is overwritten now
    async_copy.wait_group(0)
    return best, weight, out


@gluon.jit
def prompt_kernel(
    q_THX,
    latents,
    chosen_TK,
    positions_T,
    kinds_T,
    out_THC,
    H,
    most,
    scale,
    KIND: gl.constexpr,
    HEADS: gl.constexpr,
    LATENT: gl.constexpr,
    ROTATED: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Some heads of one token of a prompt."""
    token = gl.program_id(1).to(gl.int64)
    if gl.load(kinds_T + token) == KIND:
        end = gl.minimum(gl.load(positions_T + token) + 1, most)
        of_scores: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK // 2, 16]
        )
        of_values: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, LATENT // 2, 16]
        )
        _, weight, out = attend_range(
            q_THX, latents, chosen_TK + token * most, token, 0, end, H, scale, HEADS, LATENT, ROTATED, BLOCK, of_scores,
            of_values,
        )  # fmt: skip
        out = out / gl.convert_layout(weight, gl.SliceLayout(1, of_values))[:, None]
        own = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, of_values))
        c = gl.arange(0, LATENT, gl.SliceLayout(0, of_values))
        gl.store(out_THC + ((token * H + own) * LATENT)[:, None] + c[None, :], out.to(out_THC.dtype.element_ty))


@gluon.jit
def split_kernel(
    q_THX,
    latents,
    chosen_TK,
    positions_T,
    tiles_X2,
    best_PXH,
    weight_PXH,
    out_PXHC,
    first_tile,
    X,
    H,
    most,
    scale,
    SPLIT: gl.constexpr,
    HEADS: gl.constexpr,
    LATENT: gl.constexpr,
    ROTATED: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    """Some heads of one token, which is a tile, and a split of what was chosen for it."""
    tile = gl.program_id(1)
    token = gl.load(tiles_X2 + 2 * (first_tile + tile)).to(gl.int64)
    count = gl.load(tiles_X2 + 2 * (first_tile + tile) + 1)
    end = gl.minimum(gl.load(positions_T + token) + 1, most)
    begin = gl.program_id(2) * SPLIT
    if PDL:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    if (count > 0) & (begin < end):
        of_scores: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK // 2, 16]
        )
        of_values: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, LATENT // 2, 16]
        )
        best, weight, out = attend_range(
            q_THX, latents, chosen_TK + token * most, token, begin, gl.minimum(begin + SPLIT, end), H, scale, HEADS,
            LATENT, ROTATED, BLOCK, of_scores, of_values,
        )  # fmt: skip
        row = (gl.program_id(2) * X + tile).to(gl.int64) * H + gl.program_id(0) * HEADS
        head = gl.arange(0, HEADS, gl.SliceLayout(1, of_scores))
        gl.store(best_PXH + row + head, best)
        gl.store(weight_PXH + row + head, weight)
        own = gl.arange(0, HEADS, gl.SliceLayout(1, of_values))
        c = gl.arange(0, LATENT, gl.SliceLayout(0, of_values))
        gl.store(out_PXHC + ((row + own) * LATENT)[:, None] + c[None, :], out)


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
        for number in tl.range(0, tl.cdiv(end, SPLIT), num_stages=2):
            at = (number * X + tile).to(tl.int64) * H + head
            new_out = tl.load(out_PXHC + at[:, None] * LATENT + c[None, :])
            best, weight, out = combined(
                best, weight, out, tl.load(best_PXH + at), tl.load(weight_PXH + at), new_out
            )  # fmt: skip
        out = tl.where(weight[:, None] > 0, out / weight[:, None], 0.0)
        tl.store(out_THC + (token * H + head[:, None]) * LATENT + c[None, :], out.to(out_THC.dtype.element_ty))


def takes(q_THX: torch.Tensor, latents: torch.Tensor, rope_size: int) -> bool:
    sizes = q_THX.shape[2] - rope_size == LATENT and rope_size == ROTATED and q_THX.shape[1] % HEADS == 0
    return sizes and q_THX.dtype == latents.dtype == torch.bfloat16 and is_hopper(q_THX.device)


def attend_prompts(
    q_THX: torch.Tensor, latents: torch.Tensor, chosen_TK: torch.Tensor, rows: Rows, scale: float, out_THC: torch.Tensor
) -> None:
    T, H, _ = out_THC.shape
    prompt_kernel[(H // HEADS, T)](
        q_THX,
        latents,
        chosen_TK,
        rows.positions_T,
        rows.kinds_T,
        out_THC,
        H,
        chosen_TK.shape[1],
        scale * 1.4426950408889634,  # weights are powers of two
        KIND=CHOOSING,
        HEADS=HEADS,
        LATENT=LATENT,
        ROTATED=ROTATED,
        BLOCK=BLOCK,
        num_warps=8,
    )


def attend_tiles(
    q_THX: torch.Tensor,
    latents: torch.Tensor,
    chosen_TK: torch.Tensor,
    tiles_X2: torch.Tensor,
    rows: Rows,
    scale: float,
    out_THC: torch.Tensor,
    split: int = SPLIT,
) -> None:
    """Tiles of one token each, all by the same two kernels: so their bits are the same in any step."""
    (_, H, _), most = out_THC.shape, chosen_TK.shape[1]
    splits, several = triton.cdiv(min(rows.max_length, most), split), min(len(tiles_X2), TILES)
    best_PXH = torch.empty(splits, several, H, dtype=torch.float32, device=q_THX.device)
    weight_PXH = torch.empty_like(best_PXH)
    out_PXHC = torch.empty(splits, several, H, LATENT, dtype=torch.float32, device=q_THX.device)
    overlap = rows.read_before_wait and supports_pdl(q_THX.device)
    for first in range(0, len(tiles_X2), several):
        count = min(several, len(tiles_X2) - first)
        launch_pdl(
            split_kernel,
            (H // HEADS, count, splits),
            q_THX,
            latents,
            chosen_TK,
            rows.positions_T,
            tiles_X2,
            best_PXH,
            weight_PXH,
            out_PXHC,
            first,
            several,
            H,
            most,
            scale * 1.4426950408889634,  # weights are powers of two
            SPLIT=split,
            HEADS=HEADS,
            LATENT=LATENT,
            ROTATED=ROTATED,
            BLOCK=BLOCK,
            PDL=overlap,
            num_warps=8,
        )
        launch_pdl(
            join_kernel,
            (count, H // 4),
            best_PXH,
            weight_PXH,
            out_PXHC,
            rows.positions_T,
            tiles_X2,
            out_THC,
            first,
            several,
            H,
            most,
            SPLIT=split,
            HEADS=4,
            LATENT=LATENT,
            PDL=overlap,
            num_warps=4,
        )
