"""Latent attention of prompts: latents are expanded to every head's keys and values, and heads attend to those.

A query-key pair costs 2 (192 + 128) operations a head at DeepSeek's sizes, and in latent space 2 (576 + 512): for one
token, whose latents are read once for all heads, the latter is cheaper, for a prompt the former. The two do not give
the same bits. Keys are walked in blocks by their position in the sequence, so a token's bits do not depend on how its
prompt was cut.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)  # the largest score of no keys; finite, so that differences are
TILE = 128  # rows of one head and one sequence that attend together
BLOCK = 64  # keys to a step


@triton.jit
def gather_kernel(
    latents,
    sequences_X,
    positions_X,
    page_table_SP,
    latent_XK,
    key_XR,
    K,
    R,
    pages,
    page_size,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_X + row)
    standing = tl.maximum(position, 0)
    page = tl.load(page_table_SP + tl.load(sequences_X + row).to(tl.int64) * pages + standing // page_size)
    at = latents + (page.to(tl.int64) * page_size + standing % page_size) * (K + R)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    kind = latent_XK.dtype.element_ty
    latent = tl.load(at + k, mask=(k < K) & (position >= 0), other=0.0)
    key = tl.load(at + K + r, mask=(r < R) & (position >= 0), other=0.0)
    tl.store(latent_XK + row * K + k, latent.to(kind), mask=k < K)
    tl.store(key_XR + row * R + r, key.to(kind), mask=r < R)


def gather(
    latents: torch.Tensor,
    sequences_X: torch.Tensor,
    positions_X: torch.Tensor,
    page_table_SP: torch.Tensor,
    rank: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached latents (X, rank) and the keys that all heads share, row by row; zeros where a position is -1."""
    X, R = len(positions_X), latents.shape[-1] - rank
    latent_XK = torch.empty(X, rank, dtype=dtype, device=latents.device)
    key_XR = torch.empty(X, R, dtype=dtype, device=latents.device)
    gather_kernel[(X,)](
        latents,
        sequences_X,
        positions_X,
        page_table_SP,
        latent_XK,
        key_XR,
        rank,
        R,
        page_table_SP.shape[1],
        latents.shape[1],
        BLOCK_K=triton.next_power_of_2(rank),
        BLOCK_R=triton.next_power_of_2(R),
        num_warps=1,
    )
    return latent_XK, key_XR


@triton.jit
def attend_block(
    best,
    weight,
    out,
    q,
    rotated,
    base,
    end,
    position,
    kv,
    key_XR,
    scale,
    P,
    R,
    V,
    row_stride,
    bits,
    topk,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
    CHOSEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The next block of keys; where they are CHOSEN, those whose bits are set. Whether it is MASKED depends on how a
    prompt was cut, so products and sums are spelled out: no compiler may join them one way with a mask and another way
    without."""
    key = base + tl.arange(0, BLOCK)
    p = tl.arange(0, BLOCK_P)
    r = tl.arange(0, BLOCK_R)
    v = tl.arange(0, BLOCK_V)
    inside = key < end
    at = key.to(tl.int64) * row_stride
    plain = tl.load(kv + at[:, None] + p[None, :], mask=inside[:, None] & (p[None, :] < P), other=0.0)
    scores = tl.dot(q, tl.trans(plain), input_precision=PRECISION)
    shared = tl.load(
        key_XR + key[:, None].to(tl.int64) * R + r[None, :], mask=inside[:, None] & (r[None, :] < R), other=0.0
    )
    scores = tl.dot(rotated, tl.trans(shared), scores, input_precision=PRECISION)
    if CHOSEN:  # a row's bits of 32 keys are a word
        choosing = position >= topk
        word = tl.load(bits + base // 32, mask=choosing, other=-1)[:, None]
        if BLOCK > 32:
            second = tl.load(bits + base // 32 + 1, mask=choosing, other=-1)[:, None]
            word = tl.where((key - base)[None, :] < 32, word, second)
        scores = tl.where(((word >> (key % 32)[None, :]) & 1) != 0, scores, float("-inf"))
    if MASKED:
        scores = tl.where((key[None, :] <= position[:, None]) & inside[None, :], scores, float("-inf"))
    new = tl.maximum(best, tl.max(scores, 1) * scale)
    shrink = tl.exp2(best - new)
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) - new[:, None]))
    values = tl.load(kv + at[:, None] + P + v[None, :], mask=inside[:, None] & (v[None, :] < V), other=0.0)
    weight = tl.fma(weight, shrink, tl.sum(weights, 1))
    out = tl.dot(weights.to(q.dtype), values, out * shrink[:, None], input_precision=PRECISION)
    return new, weight, out


@triton.jit
def expanded_kernel(
    q_THC,
    q_THX,
    kv_XE,
    key_XR,
    positions_T,
    tiles_N4,
    out_THV,
    bits_TW,
    round,
    scale,
    tiles,
    H,
    P,
    R,
    V,
    rank,
    words,
    topk,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHOSEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One head of a tile of rows: first row, rows, where its sequence begins among the expanded, and in which round."""
    # The last tiles of a prompt have the most keys: they come first.
    tile = tiles_N4 + 4 * (tiles - 1 - tl.program_id(0))
    head = tl.program_id(1)
    count = tl.load(tile + 1)
    if (count > 0) & (tl.load(tile + 3) == round):
        first = tl.load(tile).to(tl.int64)
        begin = tl.load(tile + 2).to(tl.int64)
        row = tl.arange(0, TILE)
        known = row < count
        token = first + row
        position = tl.load(positions_T + token, mask=known, other=-1)
        oldest = tl.load(positions_T + first)
        last = tl.load(positions_T + first + count - 1)
        p = tl.arange(0, BLOCK_P)
        r = tl.arange(0, BLOCK_R)
        v = tl.arange(0, BLOCK_V)
        at = token * H + head
        q = tl.load(q_THC + at[:, None] * (P + R) + p[None, :], mask=known[:, None] & (p[None, :] < P), other=0.0)
        rotated = tl.load(
            q_THX + at[:, None] * (rank + R) + rank + r[None, :], mask=known[:, None] & (r[None, :] < R), other=0.0
        )
        row_stride = H * (P + V)
        kv = kv_XE + begin * row_stride + head * (P + V)
        key = key_XR + begin * R
        best = tl.full([TILE], NOTHING, tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        out = tl.zeros([TILE, BLOCK_V], tl.float32)
        bits = bits_TW + token * words
        whole = (oldest + 1) // BLOCK * BLOCK  # up to here every row sees every key
        if CHOSEN:
            whole = tl.where(last < topk, whole, 0)
        for base in tl.range(0, whole, BLOCK, num_stages=STAGES):
            best, weight, out = attend_block(
                best, weight, out, q, rotated, base, last + 1, position, kv, key, scale, P, R, V, row_stride, bits,
                topk, BLOCK, BLOCK_P, BLOCK_R, BLOCK_V, False, False, PRECISION,
            )  # fmt: skip
        for base in tl.range(whole, last + 1, BLOCK, num_stages=STAGES):
            best, weight, out = attend_block(
                best, weight, out, q, rotated, base, last + 1, position, kv, key, scale, P, R, V, row_stride, bits,
                topk, BLOCK, BLOCK_P, BLOCK_R, BLOCK_V, True, CHOSEN, PRECISION,
            )  # fmt: skip
        out = out / weight[:, None]
        tl.store(
            out_THV + at[:, None] * V + v[None, :],
            out.to(out_THV.dtype.element_ty),
            mask=known[:, None] & (v[None, :] < V),
        )


def tile_rows(wide: bool) -> int:
    return 32 if wide else TILE


def attend_expanded(
    q_THC: torch.Tensor,
    q_THX: torch.Tensor,
    kv_XE: torch.Tensor,
    key_XR: torch.Tensor,
    positions_T: torch.Tensor,
    tiles_N4: torch.Tensor,
    out_THV: torch.Tensor,
    scale: float,
    round: int = 0,
    bits_TW: torch.Tensor | None = None,
    topk: int = 0,
    block: int = BLOCK,
    stages: int = 3,
    warps: int = 8,
) -> None:
    """Write the rows of all tiles of a round. `q_THC` has queries whose first part is as it is, `q_THX` their rotated
    part at its end; `kv_XE` is each head's key and value of the expanded rows, `key_XR` the rest of their key. A token
    that sees more than `topk` attends to those whose bits of `bits_TW` are set."""
    (_, H, C), R, V = q_THC.shape, key_XR.shape[1], out_THV.shape[2]
    wide = q_THC.dtype == torch.float32
    assert kv_XE.is_contiguous() and q_THC.is_contiguous() and q_THX.is_contiguous()
    expanded_kernel[(len(tiles_N4), H)](
        q_THC,
        q_THX,
        kv_XE,
        key_XR,
        positions_T,
        tiles_N4,
        out_THV,
        positions_T if bits_TW is None else bits_TW,
        round,
        scale * 1.4426950408889634,  # weights are powers of two
        len(tiles_N4),
        H,
        C - R,
        R,
        V,
        q_THX.shape[2] - R,
        0 if bits_TW is None else bits_TW.shape[1],
        topk,
        TILE=tile_rows(wide),
        BLOCK=32 if wide else block,
        BLOCK_P=max(16, triton.next_power_of_2(C - R)),
        BLOCK_R=max(16, triton.next_power_of_2(R)),
        BLOCK_V=max(16, triton.next_power_of_2(V)),
        CHOSEN=bits_TW is not None,
        PRECISION="ieee" if wide else "tf32",
        STAGES=1 if wide else stages,
        num_warps=4 if wide else warps,
    )
