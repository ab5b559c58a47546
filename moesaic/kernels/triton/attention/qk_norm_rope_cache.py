"""Queries, keys and values ready to attend, for serving: split, normed and rotated in one pass, keys and values into
the paged cache."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.interface import KVCache, QKNorm, RopeAngles
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.attention.qk_norm_rope import rotary_pairs
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

HEADS = 8  # heads handled by one program


@triton.jit
def cache_kernel(
    qkv_TXC,
    q_norm_C,
    k_norm_C,
    cos_PR,
    sin_PR,
    angle_rows_T,
    positions_T,
    sequences_T,
    page_table_SP,
    keys,
    values,
    q_THC,
    eps,
    H,
    N,
    C,
    pages,
    page_size,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one token: QK norm, RoPE, and into the cache (keys, values)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, BLOCK_C)
    position_X = tl.load(positions_T + token + head * 0)
    angle = tl.maximum(tl.load(angle_rows_T + token), 0).to(tl.int64)
    sequence_X = tl.load(sequences_T + token + head * 0).to(tl.int64)
    page_X = tl.load(page_table_SP + sequence_X * pages + tl.maximum(position_X, 0) // page_size).to(tl.int64)
    if PDL:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    known = (head[:, None] < H + 2 * N) & (c[None, :] < C)
    row = qkv_TXC + (token * (H + 2 * N) + head[:, None]) * C
    kind = q_THC.dtype.element_ty
    j, own_c, pair_c = rotary_pairs(c, R, INTERLEAVED)
    is_value = head >= H + N
    own_c = tl.where(is_value[:, None], c[None, :], own_c[None, :])
    own = tl.load(row + own_c, mask=known, other=0.0)
    pair = tl.load(row + pair_c[None, :], mask=known, other=0.0)
    rotated, other = own, pair
    if q_norm_C is not None:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / C + eps)[:, None]
        is_query = (head < H)[:, None]
        inside = (c < C)[None, :] & (head >= 0)[:, None]
        own_weight = tl.where(
            is_query,
            tl.load(q_norm_C + own_c, mask=inside, other=0.0),
            tl.load(k_norm_C + own_c, mask=inside, other=0.0),
        ).to(kind)
        pair_weight = tl.where(
            is_query,
            tl.load(q_norm_C + pair_c[None, :], mask=inside, other=0.0),
            tl.load(k_norm_C + pair_c[None, :], mask=inside, other=0.0),
        ).to(kind)
        rotated = (wide * scale).to(kind) * own_weight
        other = (pair.to(tl.float32) * scale).to(kind) * pair_weight
    rotates = c < 2 * R
    cos = tl.load(cos_PR + angle * R + j, mask=rotates, other=1.0).to(kind)[None, :]
    sin = tl.load(sin_PR + angle * R + j, mask=rotates, other=0.0).to(kind)[None, :]
    straight = (rotated * cos).to(kind).to(tl.float32)
    across = (other * sin).to(kind).to(tl.float32)
    rotated = tl.where((c < R)[None, :], straight - across, straight + across).to(kind)
    tl.store(q_THC + (token * H + head[:, None]) * C + c[None, :], rotated, mask=known & (head < H)[:, None])
    stored = known & (position_X >= 0)[:, None]
    slot = ((page_X * page_size + tl.maximum(position_X, 0) % page_size) * N)[:, None]
    key_at = keys + (slot + head[:, None] - H) * C + c[None, :]
    value_at = values + (slot + head[:, None] - H - N) * C + c[None, :]
    cached = keys.dtype.element_ty
    tl.store(key_at, rotated.to(cached), mask=stored & ((head >= H) & (head < H + N))[:, None])
    tl.store(value_at, own.to(cached), mask=stored & is_value[:, None])


def qk_norm_rope_into_cache(
    qkv_TX: torch.Tensor,
    norm: QKNorm | None,
    rope: RopeAngles,
    angles_T: torch.Tensor,
    rows: Rows,
    cache: KVCache,
    H: int,
    N: int,
) -> torch.Tensor:
    """Queries ready to attend (T, H, C); keys and values are in the cache. `angles_T` is each token's row of `rope`."""
    T, C = qkv_TX.shape[0], qkv_TX.shape[1] // (H + 2 * N)
    keys, values = cache["keys"], cache["values"]
    q_THC = torch.empty(T, H, C, dtype=qkv_TX.dtype, device=qkv_TX.device)
    q_norm, k_norm, eps = norm if norm is not None else (None, None, 0.0)
    launch_pdl(
        cache_kernel,
        (T, triton.cdiv(H + 2 * N, HEADS)),
        qkv_TX,
        q_norm,
        k_norm,
        rope.cos_TR,
        rope.sin_TR,
        angles_T,
        rows.positions_T,
        rows.sequences_T,
        rows.page_table_SP,
        keys,
        values,
        q_THC,
        eps,
        H,
        N,
        C,
        rows.page_table_SP.shape[1],
        keys.shape[1],
        R=rope.cos_TR.shape[1],
        INTERLEAVED=rope.interleaved,
        HEADS=HEADS,
        BLOCK_C=triton.next_power_of_2(C),
        PDL=rows.read_before_wait and supports_pdl(qkv_TX.device),
        num_warps=4,
    )
    return q_THC
