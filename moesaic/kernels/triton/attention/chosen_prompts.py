"""Latent attention of a prompt's tokens to what an indexer chose for each of them (DSA), in latent space.

A token's heads share what was chosen: they are the rows of a matmul whose columns are the latents of those tokens,
gathered from the cache. A program has some heads and a part of the values' numbers, because sums of half a thousand
numbers for so many rows do not fit into registers; scores are computed for each part anew. Keys are walked in the order
in which they were chosen, and a token's bits depend on nothing but its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moesaic.kernels.triton.attention import latent_hopper
from moesaic.kernels.triton.attention.latent_hopper import HEADS, attend_range, shared_memory, store_heads
from moesaic.kernels.triton.attention.paged import max_divisor
from moesaic.kernels.triton.attention.paged_kernels import NOTHING, widened
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.attention.prompt_rows import CHOOSING

MAX_ROWS = 64  # heads of a program
WIDE = 256  # from so many numbers of a value on, a program has a half of them


@gluon.jit
def hopper_kernel(q_THX, latents, chosen_TK, positions_T, kinds_T, out_THC, H, most, scale, KIND: gl.constexpr):
    """Some heads of one token, by two warpgroups: all numbers of the values at once."""
    token = gl.program_id(1).to(gl.int64)
    if gl.load(kinds_T + token) == KIND:
        end = gl.minimum(gl.load(positions_T + token) + 1, most)
        first_head = gl.program_id(0) * HEADS
        shared = shared_memory(q_THX.dtype.element_ty)
        _, weight, out = attend_range(
            q_THX, latents, chosen_TK + token * most, token, first_head, 0, end, H, 1, scale, shared, True
        )  # fmt: skip
        store_heads(out_THC, token * H + first_head, out, weight)


@triton.jit
def chosen_kernel(
    q_THX,
    latents,
    chosen_TK,
    positions_T,
    kinds_T,
    out_THC,
    H,
    C,
    most,
    scale,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some heads of one token, and a part of their values."""
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % PARTS
    if tl.load(kinds_T + token) == KIND:
        count = tl.minimum(tl.load(positions_T + token) + 1, most)
        X = C + ROPE_SIZE
        member = tl.arange(0, ROWS)
        known = member < GROUP
        of = token * H + tl.program_id(0) // PARTS * GROUP + member
        v = part * BLOCK_V + tl.arange(0, BLOCK_V)
        rest = (PARTS - 1 - part) * BLOCK_V + tl.arange(0, BLOCK_V)
        r = tl.arange(0, BLOCK_R)
        q = tl.load(q_THX + of[:, None] * X + v[None, :], mask=known[:, None] & (v < C)[None, :], other=0.0)
        rotated = tl.load(
            q_THX + of[:, None] * X + C + r[None, :], mask=known[:, None] & (r < ROPE_SIZE)[None, :], other=0.0
        )
        q_rest = q
        if PARTS > 1:
            q_rest = tl.load(q_THX + of[:, None] * X + rest[None, :], mask=known[:, None], other=0.0)
        chosen = chosen_TK + token * most
        best = tl.full([ROWS], NOTHING, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, BLOCK_V], tl.float32)
        FAST: tl.constexpr = PACKED and latents.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16
        for base in tl.range(0, count, BLOCK, num_stages=STAGES):
            number = base + tl.arange(0, BLOCK)
            inside = number < count
            at = latents + (tl.load(chosen + number, mask=inside, other=0).to(tl.int64) * X)[:, None]
            values = widened(
                tl.load(at + v[None, :], mask=inside[:, None] & (v < C)[None, :], other=0.0), q.dtype, FAST
            )
            shared = tl.load(at + C + r[None, :], mask=inside[:, None] & (r < ROPE_SIZE)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(values), input_precision=PRECISION)
            if PARTS > 1:
                other = widened(tl.load(at + rest[None, :], mask=inside[:, None], other=0.0), q.dtype, FAST)
                scores = tl.dot(q_rest, tl.trans(other), scores, input_precision=PRECISION)
            shared = widened(shared, q.dtype, FAST)
            scores = tl.dot(rotated, tl.trans(shared), scores, input_precision=PRECISION)
            scores = tl.where(inside[None, :], scores * scale, float("-inf"))
            new = tl.maximum(best, tl.max(scores, 1))
            shrink = tl.exp2(best - new)
            weights = tl.exp2(scores - new[:, None])
            weight = tl.fma(weight, shrink, tl.sum(weights, 1))
            out = tl.dot(weights.to(q.dtype), values, out * shrink[:, None], input_precision=PRECISION)
            best = new
        out = out / weight[:, None]
        to = out_THC + of[:, None] * C + v[None, :]
        tl.store(to, out.to(out_THC.dtype.element_ty), mask=known[:, None] & (v < C)[None, :])


def attend_chosen(
    q_THX: torch.Tensor,
    latents: torch.Tensor,
    chosen_TK: torch.Tensor,
    rows: Rows,
    scale: float,
    rope_size: int,
    out_THC: torch.Tensor,
    block: int = 64,
    stages: int = 3,
    warps: int = 4,
) -> None:
    """Write those rows of prompts that attend to what was chosen: where it lies in a cache with pages of one token."""
    T, H, C = out_THC.shape
    assert q_THX.is_contiguous() and chosen_TK.is_contiguous() and rows.kinds_T is not None
    of_rows = (q_THX, latents, chosen_TK, rows.positions_T, rows.kinds_T, out_THC)
    most, per_base = chosen_TK.shape[1], scale * 1.4426950408889634  # weights are powers of two
    if latent_hopper.takes(q_THX, latents, rope_size):
        grid = (H // HEADS.value, T)
        hopper_kernel[grid](*of_rows, H, most, per_base, KIND=CHOOSING, num_warps=8)
        return
    wide = q_THX.dtype == torch.float32
    group = max_divisor(H, 16 if wide else MAX_ROWS)
    height = max(16, triton.next_power_of_2(group))
    width = max(16, triton.next_power_of_2(C))
    parts = 2 if width == C and C > WIDE and height == MAX_ROWS else 1
    narrow = wide or height < MAX_ROWS
    chosen_kernel[(H // group * parts, T)](
        *of_rows,
        H,
        C,
        most,
        per_base,
        KIND=CHOOSING,
        GROUP=group,
        ROWS=height,
        PARTS=parts,
        BLOCK=32 if narrow else block,
        BLOCK_V=width // parts,
        BLOCK_R=max(16, triton.next_power_of_2(rope_size)),
        ROPE_SIZE=rope_size,
        PACKED=q_THX.is_cuda,
        PRECISION="ieee" if wide else "tf32",
        STAGES=1 if wide or latents.dtype.itemsize == 1 else stages,
        num_warps=8 if narrow and not wide and C > WIDE else warps,
    )
