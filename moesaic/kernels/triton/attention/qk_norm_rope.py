"""Queries, keys and values ready to attend, for training: QK norm and RoPE in one pass, and one pass back.

A row is one head of one token, as they lie side by side after the projection. Results stand where `reference.heads`
puts them: of a pair that is rotated together, the first in the first half of what is and the second in the other half.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.interface import QKNorm, RopeAngles
from moesaic.kernels.triton.graph_break import eager

ROWS = 4  # at a time, by one warp
REPEATS = 16  # so often, by one program, which then knows the sum of so many rows' gradients of the norms' weights


@triton.jit
def rotary_pairs(c, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of result c: its number among the angles, where it comes from, and where the other of its pair stands."""
    j = tl.where(c < R, c, c - R)
    first = 2 * j if INTERLEAVED else j
    second = 2 * j + 1 if INTERLEAVED else j + R
    own = tl.where(c < R, first, tl.where(c < 2 * R, second, c))
    other = tl.where(c < R, second, tl.where(c < 2 * R, first, c))
    return j, own, other


@triton.jit
def forward_kernel(
    qkv_YC,
    q_norm_C,
    k_norm_C,
    cos_TR,
    sin_TR,
    q_THC,
    k_TNC,
    v_TNC,
    eps,
    Y,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    y = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = y // (H + 2 * N), (y % (H + 2 * N)).to(tl.int32)
    c = tl.arange(0, BLOCK_C)
    j, own_c, other_c = rotary_pairs(c, R, INTERLEAVED)
    known = (y < Y)[:, None] & (c < C)[None, :]
    is_query, is_value = head < H, head >= H + N
    kind = q_THC.dtype.element_ty
    row = qkv_YC + y[:, None] * C
    own = tl.load(row + tl.where(is_value[:, None], c[None, :], own_c[None, :]), mask=known, other=0.0)
    rotates = known & (c < 2 * R)[None, :] & ~is_value[:, None]
    other = tl.load(row + other_c[None, :], mask=rotates, other=0.0)
    rotated = own
    if q_norm_C is not None:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / C + eps)[:, None]
        own_weight = weight_of(q_norm_C, k_norm_C, own_c, C, is_query)
        other_weight = weight_of(q_norm_C, k_norm_C, other_c, C, is_query)
        rotated = (wide * scale).to(kind) * own_weight.to(kind)
        other = (other.to(tl.float32) * scale).to(kind) * other_weight.to(kind)
    cos = tl.load(cos_TR + token[:, None] * R + j[None, :], mask=rotates, other=1.0).to(kind)
    sin = tl.load(sin_TR + token[:, None] * R + j[None, :], mask=rotates, other=0.0).to(kind)
    straight, across = (rotated * cos).to(kind).to(tl.float32), (other * sin).to(kind).to(tl.float32)
    rotated = tl.where((c < R)[None, :], straight - across, straight + across).to(kind)
    is_key = (head >= H) & (head < H + N)
    tl.store(q_THC + ((token * H + head) * C)[:, None] + c[None, :], rotated, mask=known & is_query[:, None])
    tl.store(k_TNC + ((token * N + head - H) * C)[:, None] + c[None, :], rotated, mask=known & is_key[:, None])
    tl.store(v_TNC + ((token * N + head - H - N) * C)[:, None] + c[None, :], own, mask=known & is_value[:, None])


@triton.jit
def weight_of(q_norm_C, k_norm_C, at, C: tl.constexpr, is_query):
    q = tl.load(q_norm_C + at, mask=at < C, other=0.0)
    k = tl.load(k_norm_C + at, mask=at < C, other=0.0)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


@triton.jit
def backward_kernel(
    qkv_YC,
    q_norm_C,
    k_norm_C,
    cos_TR,
    sin_TR,
    grad_q_THC,
    grad_k_TNC,
    grad_v_TNC,
    grad_qkv_YC,
    grad_norms_P2C,
    eps,
    Y,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    j, own_c, _ = rotary_pairs(c, R, INTERLEAVED)
    across_c = tl.where(c < R, c + R, tl.where(c < 2 * R, c - R, c))  # where the other of the pair stands among results
    kind = grad_qkv_YC.dtype.element_ty
    q_sum = tl.zeros([ROWS, BLOCK_C], tl.float32)
    k_sum = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for repeat in range(REPEATS):
        y = (program * REPEATS + repeat) * ROWS + tl.arange(0, ROWS)
        token, head = y // (H + 2 * N), (y % (H + 2 * N)).to(tl.int32)
        known = (y < Y)[:, None] & (c < C)[None, :]
        is_query, is_value = head < H, head >= H + N
        is_key = (head >= H) & (head < H + N)
        from_q = grad_q_THC + ((token * H + head) * C)[:, None]
        from_k = grad_k_TNC + ((token * N + head - H) * C)[:, None]
        from_v = grad_v_TNC + ((token * N + head - H - N) * C)[:, None]
        rotates = known & (c < 2 * R)[None, :] & ~is_value[:, None]
        grad = (
            tl.load(from_q + c[None, :], mask=known & is_query[:, None], other=0.0).to(tl.float32)
            + tl.load(from_k + c[None, :], mask=known & is_key[:, None], other=0.0).to(tl.float32)
            + tl.load(from_v + c[None, :], mask=known & is_value[:, None], other=0.0).to(tl.float32)
        )
        across = (
            tl.load(from_q + across_c[None, :], mask=rotates & is_query[:, None], other=0.0).to(tl.float32)
            + tl.load(from_k + across_c[None, :], mask=rotates & is_key[:, None], other=0.0).to(tl.float32)
        )  # fmt: skip
        cos = tl.load(cos_TR + token[:, None] * R + j[None, :], mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_TR + token[:, None] * R + j[None, :], mask=rotates, other=0.0).to(tl.float32)
        grad = tl.where((c < R)[None, :], grad * cos + across * sin, grad * cos - across * sin)
        at = y[:, None] * C + tl.where(is_value[:, None], c[None, :], own_c[None, :])
        if q_norm_C is not None:
            x = tl.load(qkv_YC + at, mask=known, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
            of_weight = grad * x * scale
            q_sum += tl.where(is_query[:, None], of_weight, 0.0)
            k_sum += tl.where(is_key[:, None], of_weight, 0.0)
            scaled = grad * weight_of(q_norm_C, k_norm_C, own_c, C, is_query).to(tl.float32)
            through = scale * (scaled - x * scale * scale * (tl.sum(x * scaled, 1) / C)[:, None])
            grad = tl.where(is_value[:, None], grad, through)
        tl.store(grad_qkv_YC + at, grad.to(kind), mask=known)
    if q_norm_C is not None:
        tl.store(grad_norms_P2C + program * 2 * C + own_c, tl.sum(q_sum, 0), mask=c < C)
        tl.store(grad_norms_P2C + (program * 2 + 1) * C + own_c, tl.sum(k_sum, 0), mask=c < C)


class QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv_TXC, q_weight_C, k_weight_C, cos_TR, sin_TR, kv_heads: int, eps: float, interleaved: bool):
        qkv_TXC, cos_TR, sin_TR = qkv_TXC.contiguous(), cos_TR.contiguous(), sin_TR.contiguous()
        (T, X, C), N = qkv_TXC.shape, kv_heads
        q_THC, k_TNC, v_TNC = (qkv_TXC.new_empty(T, count, C) for count in (X - 2 * N, N, N))
        facts = {
            "H": X - 2 * N, "N": N, "C": C, "R": cos_TR.shape[1], "INTERLEAVED": interleaved, "ROWS": ROWS,
            "BLOCK_C": triton.next_power_of_2(C), "num_warps": 1,
        }  # fmt: skip
        forward_kernel[(triton.cdiv(T * X, ROWS),)](
            qkv_TXC, q_weight_C, k_weight_C, cos_TR, sin_TR, q_THC, k_TNC, v_TNC, eps, T * X, **facts
        )
        ctx.save_for_backward(qkv_TXC if q_weight_C is not None else None, q_weight_C, k_weight_C, cos_TR, sin_TR)
        ctx.eps, ctx.facts, ctx.shape = eps, facts, qkv_TXC.shape
        return q_THC, k_TNC, v_TNC

    @staticmethod
    def backward(ctx, *grads: Tensor):
        qkv_TXC, q_weight_C, k_weight_C, cos_TR, sin_TR = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        T, X, C = ctx.shape
        programs = triton.cdiv(T * X, ROWS * REPEATS)
        grad_qkv_TXC = grads[0].new_empty(T, X, C)
        grad_norms_P2C = None
        if q_weight_C is not None:
            grad_norms_P2C = torch.empty(programs, 2, C, dtype=torch.float32, device=grad_qkv_TXC.device)
        backward_kernel[(programs,)](
            qkv_TXC, q_weight_C, k_weight_C, cos_TR, sin_TR, *grads, grad_qkv_TXC, grad_norms_P2C, ctx.eps, T * X,
            **ctx.facts, REPEATS=REPEATS,
        )  # fmt: skip
        of_q = of_k = None
        if grad_norms_P2C is not None:
            of_q, of_k = (part.to(q_weight_C.dtype) for part in grad_norms_P2C.sum(0))
        return grad_qkv_TXC, of_q, of_k, None, None, None, None, None


# Compilers of whole blocks stop before attention anyway.
@eager
def qk_norm_rope(
    qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
) -> tuple[Tensor, Tensor, Tensor]:
    q_C, k_C, eps = (None, None, 0.0) if norm is None else norm
    found: tuple[Tensor, Tensor, Tensor] = QkNormRope.apply(
        qkv_TXC, q_C, k_C, rope.cos_TR, rope.sin_TR, kv_heads, eps, rope.interleaved
    )
    return found
