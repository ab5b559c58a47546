"""Attention to what an indexer chose for a prompt's tokens (`chosen_prompts.py`), on Hopper: two warpgroups share a
token's latents.

64 heads are what the tensor cores multiply at once, and half a thousand sums for each fill the registers of two
warpgroups: each has a half of the keys of a score matmul and a half of the values' numbers of the other. Latents go
from the cache to shared memory row by row, those of the next step while this one is multiplied, and are key and value
where they lie.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moesaic.kernels.triton.dependent_launch import is_hopper
from moesaic.kernels.triton.experts.hopper.copies import row_load

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

HEADS, LATENT, ROTATED = 64, 512, 64  # of a program; numbers of a latent, and of the key beside it
BLOCK = 64  # keys to a step


@gluon.jit
def fetch(plain, rotated, latents, slot, known, LATENT: gl.constexpr, ROTATED: gl.constexpr, layout: gl.constexpr):
    """Rows of the cache; zeros where there is none."""
    row = latents + slot.to(gl.int64) * (LATENT + ROTATED)
    c = gl.arange(0, LATENT, gl.SliceLayout(0, layout))
    r = gl.arange(0, ROTATED, gl.SliceLayout(0, layout))
    row_load(plain, row[:, None] + c[None, :], mask=known[:, None])
    row_load(rotated, row[:, None] + (LATENT + r)[None, :], mask=known[:, None])


@gluon.jit
def chosen_hopper_kernel(
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
    """Some heads of one token."""
    token = gl.program_id(1).to(gl.int64)
    if gl.load(kinds_T + token) == KIND:
        count = gl.minimum(gl.load(positions_T + token) + 1, most)
        kind: gl.constexpr = q_THX.dtype.element_ty
        copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        of_scores: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK // 2, 16]
        )
        of_values: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, LATENT // 2, 16]
        )
        queries = gl.allocate_shared_memory(kind, [HEADS, LATENT], swizzled)
        queries_rotated = gl.allocate_shared_memory(kind, [HEADS, ROTATED], swizzled)
        keys = gl.allocate_shared_memory(kind, [2, BLOCK, LATENT], swizzled)
        keys_rotated = gl.allocate_shared_memory(kind, [2, BLOCK, ROTATED], swizzled)
        shares = gl.allocate_shared_memory(kind, [HEADS, BLOCK], swizzled)
        head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, copied))
        number = gl.arange(0, BLOCK, gl.SliceLayout(1, copied))
        chosen = chosen_TK + token * most
        slot = gl.load(chosen + number, mask=number < count, other=0)
        fetch(queries, queries_rotated, q_THX, token * H + head, head < H, LATENT, ROTATED, copied)
        fetch(keys.index(0), keys_rotated.index(0), latents, slot, number < count, LATENT, ROTATED, copied)
        async_copy.commit_group()
        slot = gl.load(chosen + BLOCK + number, mask=BLOCK + number < count, other=0)
        best = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, of_scores))
        weight = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, of_scores))
        out = gl.zeros([HEADS, LATENT], gl.float32, of_values)
        column = gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
        for base in range(0, count, BLOCK):
            stage = base // BLOCK % 2
            following = base + BLOCK + number
            fetch(
                keys.index(1 - stage), keys_rotated.index(1 - stage), latents, slot, following < count, LATENT, ROTATED,
                copied,
            )  # fmt: skip
            async_copy.commit_group()
            slot = gl.load(chosen + BLOCK + following, mask=BLOCK + following < count, other=0)
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            scores = gl.zeros([HEADS, BLOCK], gl.float32, of_scores)
            scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma(queries_rotated, keys_rotated.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where((base + column < count)[None, :], scores * scale, float("-inf"))
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
        out = out / gl.convert_layout(weight, gl.SliceLayout(1, of_values))[:, None]
        own = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, of_values))
        c = gl.arange(0, LATENT, gl.SliceLayout(0, of_values))
        gl.store(out_THC + ((token * H + own) * LATENT)[:, None] + c[None, :], out.to(kind))


def takes(q_THX: torch.Tensor, latents: torch.Tensor, rope_size: int) -> bool:
    sizes = q_THX.shape[2] - rope_size == LATENT and rope_size == ROTATED and q_THX.shape[1] % HEADS == 0
    return sizes and q_THX.dtype == latents.dtype == torch.bfloat16 and is_hopper(q_THX.device)


def attend_on_hopper(
    q_THX: torch.Tensor,
    latents: torch.Tensor,
    chosen_TK: torch.Tensor,
    positions_T: torch.Tensor,
    kinds_T: torch.Tensor,
    kind: int,
    scale: float,
    out_THC: torch.Tensor,
) -> None:
    T, H, _ = out_THC.shape
    chosen_hopper_kernel[(H // HEADS, T)](
        q_THX,
        latents,
        chosen_TK,
        positions_T,
        kinds_T,
        out_THC,
        H,
        chosen_TK.shape[1],
        scale * 1.4426950408889634,  # weights are powers of two
        KIND=kind,
        HEADS=HEADS,
        LATENT=LATENT,
        ROTATED=ROTATED,
        BLOCK=BLOCK,
        num_warps=8,
    )
