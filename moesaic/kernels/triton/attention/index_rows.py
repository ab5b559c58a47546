"""What DSA's indexer (DeepSeek-V3.2, GLM-5) keeps of a token and asks with: its key in the paged cache, normed and
rotated, and the queries of its light heads, rotated. Halves of what is rotated stand where `reference.rotate` has them.
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

HEADS = 8  # whose queries are rotated by one program


@triton.jit
def turned(first, second, cos, sin):
    """A pair, rotated; rounded as the library does it."""
    kind = first.dtype
    low = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
    high = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind)


@triton.jit
def index_rows_kernel(
    q_THC,
    k_TC,
    weight_C,
    bias_C,
    cos_PR,
    sin_PR,
    angle_rows_T,
    positions_T,
    sequences_T,
    page_table_SP,
    keys,
    out_THC,
    eps,
    H,
    C,
    pages,
    page_size,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads' queries of one token; the first program also norms and rotates its key and puts it into the cache."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_T + token)
    standing = tl.maximum(position, 0).to(tl.int64)
    angle = tl.maximum(tl.load(angle_rows_T + token), 0).to(tl.int64)
    sequence = tl.load(sequences_T + token).to(tl.int64)
    page = tl.load(page_table_SP + sequence * pages + standing // page_size).to(tl.int64)
    if PDL:  # where tokens stand was known before the forward began
        gdc_launch_dependents()
        gdc_wait()
    c = tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK_R)
    first_c = 2 * j if INTERLEAVED else j
    second_c = 2 * j + 1 if INTERLEAVED else j + R
    kind = k_TC.dtype.element_ty
    cos = tl.load(cos_PR + angle * R + j, mask=j < R, other=1.0).to(kind)
    sin = tl.load(sin_PR + angle * R + j, mask=j < R, other=0.0).to(kind)
    plain = (c >= 2 * R) & (c < C)
    if q_THC is not None:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        row = q_THC + (token * H + head) * C
        to = out_THC + (token * H + head) * C
        inside = (head < H) & (j < R)[None, :]
        first = tl.load(row + first_c[None, :], mask=inside, other=0.0)
        second = tl.load(row + second_c[None, :], mask=inside, other=0.0)
        low, high = turned(first, second, cos[None, :], sin[None, :])
        tl.store(to + j[None, :], low, mask=inside)
        tl.store(to + R + j[None, :], high, mask=inside)
        same = (head < H) & plain[None, :]
        tl.store(to + c[None, :], tl.load(row + c[None, :], mask=same, other=0.0), mask=same)
    if (tl.program_id(1) == 0) & (position >= 0):
        row_key = k_TC + token * C
        key = tl.load(row_key + c, mask=c < C, other=0.0).to(tl.float32)
        mean = tl.sum(key, 0) / C
        apart = tl.where(c < C, key - mean, 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart, 0) / C + eps)
        to_key = keys + (page * page_size + standing % page_size) * C
        cached = keys.dtype.element_ty
        whole = normed(row_key, weight_C, bias_C, c, plain, mean, scale)
        tl.store(to_key + c, whole.to(kind).to(cached), mask=plain)
        first_key = normed(row_key, weight_C, bias_C, first_c, j < R, mean, scale).to(kind)
        second_key = normed(row_key, weight_C, bias_C, second_c, j < R, mean, scale).to(kind)
        low_key, high_key = turned(first_key, second_key, cos, sin)
        tl.store(to_key + j, low_key.to(cached), mask=j < R)
        tl.store(to_key + R + j, high_key.to(cached), mask=j < R)


@triton.jit
def normed(row, weight_C, bias_C, at, inside, mean, scale):
    x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_C + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_C + at, mask=inside, other=0.0).to(tl.float32)
    return tl.fma((x - mean) * scale, weight, bias)


def index_rows(
    q_TX: torch.Tensor | None,
    k_TC: torch.Tensor,
    norm: NormWeights,
    rope: RopeAngles,
    angles_T: torch.Tensor,
    rows: Rows,
    keys: torch.Tensor,
) -> torch.Tensor | None:
    """Queries (T, H, C) ready to score, where there are some; the tokens' keys (pages, page size, C) are in the cache.
    `angles_T` is each token's row of `rope`."""
    T, C = k_TC.shape
    q_THC = None if q_TX is None else q_TX.unflatten(1, (-1, C))
    out_THC = None if q_THC is None else torch.empty_like(q_THC)
    H = 1 if q_THC is None else q_THC.shape[1]
    R = rope.cos_TR.shape[1]
    assert k_TC.is_contiguous() and (q_THC is None or q_THC.is_contiguous()) and norm.bias is not None
    launch_pdl(
        index_rows_kernel,
        (T, triton.cdiv(H, HEADS)),
        q_THC,
        k_TC,
        norm.weight,
        norm.bias,
        rope.cos_TR,
        rope.sin_TR,
        angles_T,
        rows.positions_T,
        rows.sequences_T,
        rows.page_table_SP,
        keys,
        out_THC,
        norm.eps,
        H,
        C,
        rows.page_table_SP.shape[1],
        keys.shape[1],
        R=R,
        INTERLEAVED=rope.interleaved,
        HEADS=HEADS,
        BLOCK_C=triton.next_power_of_2(C),
        BLOCK_R=triton.next_power_of_2(R),
        PDL=rows.read_before_wait and supports_pdl(k_TC.device),
        num_warps=4,
    )
    return out_THC
