"""Latent attention over a paged cache: all heads share one key, the latent, which is their value too.

The projections of keys and of values are folded into queries and outputs, head by head, so that nothing in the cache is
expanded. K is walked in order and never split, and a row's bits are its own, as everywhere.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.interface import RopeAngles
from moesaic.kernels.layer_weights import NormWeights
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

HEADS = 8  # heads whose queries are rotated by one program


@triton.jit
def rotated_halves(row, known, cos_PR, sin_PR, angle, R: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two halves of rows that begin at `row`, rotated by an angle; rounded as the library does it."""
    j = tl.arange(0, BLOCK)[None, :]
    inside = known & (j < R)
    first = tl.load(row + (2 * j if INTERLEAVED else j), mask=inside, other=0.0)
    second = tl.load(row + (2 * j + 1 if INTERLEAVED else j + R), mask=inside, other=0.0)
    kind = first.dtype
    cos = tl.load(cos_PR + angle * R + j, mask=j < R, other=1.0).to(kind)
    sin = tl.load(sin_PR + angle * R + j, mask=j < R, other=0.0).to(kind)
    low = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
    high = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind), inside


@triton.jit
def latent_kernel(
    q_THC,
    kv_TX,
    weight_K,
    cos_PR,
    sin_PR,
    angle_rows_T,
    positions_T,
    sequences_T,
    page_table_SP,
    latents,
    q_THX,
    eps,
    H,
    C,
    K,
    pages,
    page_size,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rotated part of some heads' queries of one token; the first program also norms its latent, rotates its key,
    and puts both into the cache."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_T + token)
    standing = tl.maximum(position, 0).to(tl.int64)
    angle = tl.maximum(tl.load(angle_rows_T + token), 0).to(tl.int64)
    sequence = tl.load(sequences_T + token).to(tl.int64)
    page = tl.load(page_table_SP + sequence * pages + standing // page_size).to(tl.int64)
    if PDL:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    X = K + 2 * R
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    row = q_THC + (token * H + head) * C + C - 2 * R
    low, high, inside = rotated_halves(row, head < H, cos_PR, sin_PR, angle, R, BLOCK_R, INTERLEAVED)
    to = q_THX + (token * H + head) * X + K + tl.arange(0, BLOCK_R)[None, :]
    tl.store(to, low, mask=inside)
    tl.store(to + R, high, mask=inside)
    if (tl.program_id(1) == 0) & (position >= 0):
        k = tl.arange(0, BLOCK_K)
        kind = q_THX.dtype.element_ty
        cached = latents.dtype.element_ty
        latent = tl.load(kv_TX + token * X + k, mask=k < K, other=0.0).to(tl.float32)
        latent = (latent * tl.rsqrt(tl.sum(latent * latent, 0) / K + eps)).to(kind)
        latent *= tl.load(weight_K + k, mask=k < K, other=0.0).to(kind)
        slot = latents + (page * page_size + standing % page_size) * X
        tl.store(slot + k, latent.to(cached), mask=k < K)
        one = tl.zeros([1, 1], tl.int64)
        key_low, key_high, key_inside = rotated_halves(
            kv_TX + token * X + K + one, one == 0, cos_PR, sin_PR, angle, R, BLOCK_R, INTERLEAVED
        )
        key_to = slot + K + tl.arange(0, BLOCK_R)[None, :]
        tl.store(key_to, key_low.to(cached), mask=key_inside)
        tl.store(key_to + R, key_high.to(cached), mask=key_inside)


@triton.jit
def head_kernel(
    x,
    weight,
    out,
    wanted_T,
    T,
    INPUTS,
    OUTPUTS,
    x_token,
    x_head,
    weight_head,
    weight_output,
    weight_input,
    out_token,
    out_head,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SOME: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of one head times that head's matrix; with SOME, those that are wanted."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(2).to(tl.int64)
    m = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    wanted = m < T
    if SOME:
        wanted = wanted & (tl.load(wanted_T + m, mask=wanted, other=0) != 0)
        INPUTS = tl.where(tl.max(wanted.to(tl.int32), 0) > 0, INPUTS, 0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + (m * x_token + head * x_head)[:, None] + k[None, :]
    weight_at = weight + head * weight_head + k[:, None] * weight_input + n[None, :] * weight_output
    total = tl.zeros([BM, BN], tl.float32)
    for base in tl.range(0, INPUTS, BK):
        inside = k < INPUTS - base
        rows = tl.load(x_at, mask=wanted[:, None] & inside[None, :], other=0.0)
        block = tl.load(weight_at, mask=inside[:, None] & (n[None, :] < OUTPUTS), other=0.0)
        total = tl.dot(rows, block, total, input_precision=PRECISION)
        x_at += BK
        weight_at += BK * weight_input
    out_at = out + (m * out_token + head * out_head)[:, None] + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=wanted[:, None] & (n[None, :] < OUTPUTS))


def matmul_by_head(
    x_THI: torch.Tensor, weight_HOI: torch.Tensor, out_THO: torch.Tensor, wanted_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Each head's rows times its own matrix; any of the three may be a part of something larger. Of rows that are not
    `wanted_T` nothing is written."""
    (T, H, inputs), outputs = x_THI.shape, weight_HOI.shape[1]
    assert x_THI.stride(2) == out_THO.stride(2) == 1
    BM, BN = min(64, max(16, triton.next_power_of_2(T))), 64
    launch_pdl(
        head_kernel,
        (triton.cdiv(outputs, BN), triton.cdiv(T, BM), H),
        x_THI,
        weight_HOI,
        out_THO,
        wanted_T,
        T,
        inputs,
        outputs,
        x_THI.stride(0),
        x_THI.stride(1),
        *weight_HOI.stride(),
        out_THO.stride(0),
        out_THO.stride(1),
        BM=BM,
        BN=BN,
        BK=64,
        SOME=wanted_T is not None,
        PRECISION="ieee" if x_THI.dtype == torch.float32 else "tf32",
        PDL=supports_pdl(x_THI.device),
        num_warps=4,
    )
    return out_THO


def queries_into_cache(
    q_THC: torch.Tensor,
    kv_TX: torch.Tensor,
    up_HPK: torch.Tensor,
    norm: NormWeights,
    rope: RopeAngles,
    angles_T: torch.Tensor,
    rows: Rows,
    latents: torch.Tensor,
) -> torch.Tensor:
    """Queries ready to attend to latents (T, H, X); the tokens' own latents are in the cache. `kv_TX` are latents
    before their norm and keys before RoPE, `up_HPK` each head's projection of keys; `angles_T` is each token's row of
    `rope`. Rows of prompts have the rotated part of their queries only, which is the last."""
    (T, H, C), (P, K), R = q_THC.shape, up_HPK.shape[1:], rope.cos_TR.shape[1]
    q_THX = torch.empty(T, H, kv_TX.shape[1], dtype=q_THC.dtype, device=q_THC.device)
    launch_pdl(
        latent_kernel,
        (T, triton.cdiv(H, HEADS)),
        q_THC,
        kv_TX,
        norm.weight,
        rope.cos_TR,
        rope.sin_TR,
        angles_T,
        rows.positions_T,
        rows.sequences_T,
        rows.page_table_SP,
        latents,
        q_THX,
        norm.eps,
        H,
        C,
        K,
        rows.page_table_SP.shape[1],
        latents.shape[1],
        R=R,
        INTERLEAVED=rope.interleaved,
        HEADS=HEADS,
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_R=triton.next_power_of_2(R),
        PDL=rows.read_before_wait and supports_pdl(q_THC.device),
        num_warps=4,
    )
    if rows.in_latent_space:
        matmul_by_head(q_THC[..., :P], up_HPK.transpose(1, 2), q_THX[..., :K], rows.kinds_T)
    return q_THX
