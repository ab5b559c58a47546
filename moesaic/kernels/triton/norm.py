"""RMS normalisation of rows, and of the heads of queries and keys, which are then turned and stored in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_overlapped, overlaps

HEADS = 8  # heads handled by one program


@triton.jit
def norm_kernel(x_TD, more_TD, weight_D, sum_TD, out_TD, D, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_D + column, mask=column < D, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * D + column
    x = tl.load(x_TD + at, mask=column < D, other=0.0).to(tl.float32)
    kind = out_TD.dtype.element_ty
    if more_TD is not None:
        x = (x + tl.load(more_TD + at, mask=column < D, other=0.0).to(tl.float32)).to(kind)
        tl.store(sum_TD + at, x, mask=column < D)
        x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(out_TD + at, x.to(kind) * weight.to(kind), mask=column < D)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension; one program per row, so a row's bits are its own."""
    return _norm(x_TD, None, weight_D, eps)[1]


def add_and_norm(
    x_TD: torch.Tensor, more_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + more, the norm of that)."""
    return _norm(x_TD, more_TD, weight_D, eps)


def _norm(
    x_TD: torch.Tensor, more_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    D = x_TD.shape[-1]
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if more_TD is None else torch.empty_like(x_TD)
    if x_TD.numel():
        launch_overlapped(
            norm_kernel,
            (x_TD.numel() // D,),
            x_TD,
            more_TD,
            weight_D,
            sum_TD,
            out_TD,
            D,
            eps,
            BLOCK=triton.next_power_of_2(D),
            OVERLAP=overlaps(x_TD.device),
            num_warps=4 if D <= 2048 else 8,
        )
    return sum_TD, out_TD


@triton.jit
def heads_kernel(
    qkv_TXC,
    q_norm_C,
    k_norm_C,
    cos_PR,
    sin_PR,
    angle_rows_T,
    places_T,
    sequences_T,
    table_SP,
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
    OVERLAP: tl.constexpr,
):
    """Some heads of one token: norm (queries and keys), turn by the token's angles, and to the cache (keys, values)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, BLOCK_C)
    place_X = tl.load(places_T + token + head * 0)
    angle = tl.maximum(tl.load(angle_rows_T + token), 0).to(tl.int64)
    sequence_X = tl.load(sequences_T + token + head * 0).to(tl.int64)
    page_X = tl.load(table_SP + sequence_X * pages + tl.maximum(place_X, 0) // page_size).to(tl.int64)
    if OVERLAP:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    known = (head[:, None] < H + 2 * N) & (c[None, :] < C)
    row = qkv_TXC + (token * (H + 2 * N) + head[:, None]) * C
    kind = q_THC.dtype.element_ty
    # Where dimension c comes from, and the other of its pair.
    j = tl.where(c < R, c, c - R)
    first = 2 * j if INTERLEAVED else j
    second = 2 * j + 1 if INTERLEAVED else j + R
    own_c = tl.where(c < R, first, tl.where(c < 2 * R, second, c))
    pair_c = tl.where(c < R, second, tl.where(c < 2 * R, first, c))
    is_value = head >= H + N
    own_c = tl.where(is_value[:, None], c[None, :], own_c[None, :])
    own = tl.load(row + own_c, mask=known, other=0.0)
    pair = tl.load(row + pair_c[None, :], mask=known, other=0.0)
    turned, other = own, pair
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
        turned = (wide * scale).to(kind) * own_weight
        other = (pair.to(tl.float32) * scale).to(kind) * pair_weight
    turning = c < 2 * R
    cos = tl.load(cos_PR + angle * R + j, mask=turning, other=1.0).to(kind)[None, :]
    sin = tl.load(sin_PR + angle * R + j, mask=turning, other=0.0).to(kind)[None, :]
    straight = (turned * cos).to(kind).to(tl.float32)
    across = (other * sin).to(kind).to(tl.float32)
    turned = tl.where((c < R)[None, :], straight - across, straight + across).to(kind)
    tl.store(q_THC + (token * H + head[:, None]) * C + c[None, :], turned, mask=known & (head < H)[:, None])
    stored = known & (place_X >= 0)[:, None]
    slot = ((page_X * page_size + tl.maximum(place_X, 0) % page_size) * N)[:, None]
    key_at = keys + (slot + head[:, None] - H) * C + c[None, :]
    value_at = values + (slot + head[:, None] - H - N) * C + c[None, :]
    cached = keys.dtype.element_ty
    tl.store(key_at, turned.to(cached), mask=stored & ((head >= H) & (head < H + N))[:, None])
    tl.store(value_at, own.to(cached), mask=stored & is_value[:, None])


def heads(
    qkv_TX: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    angles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    interleaved: bool,
    rows,
    slabs: dict[str, torch.Tensor],
    H: int,
    N: int,
) -> torch.Tensor:
    """Queries ready to attend (T, H, C); keys and values are in the cache. `norms` are of queries and keys, with their
    epsilon; `angles` the tables of cosines and sines and each token's row in them."""
    T, C = qkv_TX.shape[0], qkv_TX.shape[1] // (H + 2 * N)
    cos_PR, sin_PR, angle_rows_T = angles
    keys, values = slabs["keys"], slabs["values"]
    q_THC = torch.empty(T, H, C, dtype=qkv_TX.dtype, device=qkv_TX.device)
    q_norm, k_norm, eps = norms if norms is not None else (None, None, 0.0)
    launch_overlapped(
        heads_kernel,
        (T, triton.cdiv(H + 2 * N, HEADS)),
        qkv_TX,
        q_norm,
        k_norm,
        cos_PR,
        sin_PR,
        angle_rows_T,
        rows.places_T,
        rows.sequences_T,
        rows.table_SP,
        keys,
        values,
        q_THC,
        eps,
        H,
        N,
        C,
        rows.table_SP.shape[1],
        keys.shape[1],
        R=cos_PR.shape[1],
        INTERLEAVED=interleaved,
        HEADS=HEADS,
        BLOCK_C=triton.next_power_of_2(C),
        OVERLAP=rows.early and overlaps(qkv_TX.device),
        num_warps=4,
    )
    return q_THC
