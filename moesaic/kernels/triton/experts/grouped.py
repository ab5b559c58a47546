"""Grouped matmuls for any GPU and any shape: the plain form of what `hopper/grouped.py` does for Hopper.

    rows      C[rows of e] = A[rows of e] @ B[e]^T or @ B[e]
    columns   C[e] = A[rows of e]^T @ B[rows of e]

K is walked in order and never split. Also what the interpreter runs, so that the meaning is tested without a GPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import Any

import torch
import triton
import triton.language as tl

from moesaic.kernels.triton.experts.sort import RECORD, Routing


@triton.jit
def rows_kernel(
    a_PK,
    b,
    c_PN,
    tiles,
    totals,
    N,
    K,
    b_expert,
    b_n,
    b_k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RECORD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile < tl.load(totals):
        record = tiles + tile * RECORD
        expert = tl.load(record).to(tl.int64)
        first = (tile - tl.load(record + 1)) * BM
        row = first + tl.arange(0, BM)
        valid = row < tl.load(record + 4)
        row = (row + tl.load(record + 3)).to(tl.int64)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        total = tl.zeros([BM, BN], tl.float32)
        b_at = b + expert * b_expert + n[None, :] * b_n + k[:, None] * b_k
        a_at = a_PK + row[:, None] * K + k[None, :]
        for base in range(0, K, BK):
            inside = k < K - base
            a = tl.load(a_at, mask=valid[:, None] & inside[None, :], other=0.0)
            w = tl.load(b_at, mask=inside[:, None] & (n[None, :] < N), other=0.0)
            total = tl.dot(a, w, total, input_precision=PRECISION)
            a_at += BK
            b_at += BK * b_k
        tl.store(
            c_PN + row[:, None] * N + n[None, :],
            total.to(c_PN.dtype.element_ty),
            mask=valid[:, None] & (n[None, :] < N),
        )


@triton.jit
def columns_kernel(
    a_PM,
    b_PN,
    c_EMN,
    segments_E,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RECORD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    start = tl.load(segments_E + expert * RECORD + 3).to(tl.int64)
    count = tl.load(segments_E + expert * RECORD + 4)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    a_at = a_PM + start * M + k[None, :] * M + m[:, None]
    b_at = b_PN + start * N + k[:, None] * N + n[None, :]
    for base in range(0, count, BK):
        inside = k < count - base
        a = tl.load(a_at, mask=inside[None, :] & (m[:, None] < M), other=0.0)
        b = tl.load(b_at, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += BK * M
        b_at += BK * N
    out = c_EMN + (expert * M + m[:, None]) * N + n[None, :]
    tl.store(out, total.to(c_EMN.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def precision(a: torch.Tensor) -> str:
    return "ieee" if a.dtype == torch.float32 else "tf32"


def tile_options(a: torch.Tensor, block: int) -> dict[str, Any]:
    """What both kernels are launched with."""
    sizes = {"BN": block, "BK": min(block, 64), "RECORD": RECORD}
    return sizes | {"PRECISION": precision(a), "num_warps": 4, "num_stages": 3}


def rows(a_PK: torch.Tensor, b: torch.Tensor, routing: Routing, transposed: bool, block: int) -> torch.Tensor:
    """A's rows times their expert's matrix, stored (E, N, K), or (E, K, N) if `transposed`."""
    K = a_PK.shape[1]
    N = b.shape[2] if transposed else b.shape[1]
    n_stride, k_stride = (b.stride(2), b.stride(1)) if transposed else (b.stride(1), b.stride(2))
    c_PN = torch.empty(a_PK.shape[0], N, dtype=a_PK.dtype, device=a_PK.device)
    rows_kernel[(triton.cdiv(N, block), routing.tiles.shape[0])](
        a_PK,
        b,
        c_PN,
        routing.tiles,
        routing.totals,
        N,
        K,
        b.stride(0),
        n_stride,
        k_stride,
        BM=routing.align,
        **tile_options(a_PK, block),
    )
    return c_PN


def columns(a_PM: torch.Tensor, b_PN: torch.Tensor, routing: Routing, block: int) -> torch.Tensor:
    """For each expert, the matmul of A's rows, transposed, with B's: (E, M, N)."""
    M, N, E = a_PM.shape[1], b_PN.shape[1], routing.segments_E.shape[0]
    c_EMN = torch.empty(E, M, N, dtype=a_PM.dtype, device=a_PM.device)
    columns_kernel[(triton.cdiv(M, block), triton.cdiv(N, block), E)](
        a_PM,
        b_PN,
        c_EMN,
        routing.segments_E,
        M,
        N,
        BM=block,
        **tile_options(a_PM, block),
    )
    return c_EMN
