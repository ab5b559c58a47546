"""A matmul for serving: the same bits for a row alone and in any batch, because K is walked in order.

Tensor cores add in the same order whatever the tile, so tiles may follow the number of rows. Most of the library's
kernels add in that order too and are faster, so they are used where they do: it splits K where rows are few. Of very
few rows (`gemv`, `few_rows`) ours are faster.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.quantized import QuantizedWeight
from moesaic.kernels.triton import few_rows, gemv
from moesaic.kernels.triton.compile_ahead import only_compiling
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

Tile = tuple[int, int, int, int, int]  # rows, columns, elements of K, stages, warps
COMPARED = 1 << 19  # results that must be equal before the library is trusted with a shape
MANY_ROWS = 128  # from so many rows on, the library is asked not to split K; below, that makes it slow


@triton.jit
def linear_kernel(
    x_TI,
    weight_OI,
    bias_O,
    out_TO,
    T,
    INPUTS,
    OUTPUTS,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.cdiv(T, BM)
    program = tl.program_id(0)
    # Tiles of the same columns follow each other, so that their weights are read from memory once.
    m = (program % rows) * BM + tl.arange(0, BM)
    n = (program // rows) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_at = x_TI + m[:, None].to(tl.int64) * INPUTS + k[None, :]
    weight_at = weight_OI + n[None, :].to(tl.int64) * INPUTS + k[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for base in tl.range(0, INPUTS, BK, num_stages=STAGES):
        inside = k < INPUTS - base
        x = tl.load(x_at, mask=(m[:, None] < T) & inside[None, :], other=0.0)
        weight = tl.load(weight_at, mask=inside[:, None] & (n[None, :] < OUTPUTS), other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_at += BK
        weight_at += BK
    kind = out_TO.dtype.element_ty
    if bias_O is not None:
        total += tl.load(bias_O + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * OUTPUTS + n[None, :]
    kept = (m[:, None] < T) & (n[None, :] < OUTPUTS)
    tl.store(out_TO + at, total.to(kind), mask=kept)


def tile_for(T: int, inputs: int, outputs: int, wide: bool) -> Tile:
    """Measured on an H200 for bf16; `wide` (float32) takes small tiles, which always fit."""
    if wide:
        return (16, 32, 64, 2, 4)
    if outputs <= 256:  # a router: few columns, so few programs, each with little to carry
        return (16, 16, 512, 3, 2)
    if T <= 16:
        return (16, 32, 256, 4, 4) if outputs >= 16384 else (64, 16, 128, 8, 4)
    if T <= 64:
        return (triton.next_power_of_2(T), 32, 128, 4, 4)
    if T <= 256:
        return (64, 64, 128, 4, 4)
    return (128, 128, 64, 4, 8)


def linear(
    x_TI: torch.Tensor, weight_OI: torch.Tensor | QuantizedWeight, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias."""
    if isinstance(weight_OI, QuantizedWeight):
        return weight_OI.linear(x_TI, bias_O)
    T, inputs = x_TI.shape
    own = gemv.takes(x_TI, weight_OI.shape[0]) or few_rows.takes(x_TI, weight_OI)
    if x_TI.dtype == torch.bfloat16 and x_TI.is_cuda and not own:
        if T >= MANY_ROWS and can_forbid_splitting():
            with no_splitting():
                return F.linear(x_TI, weight_OI, bias_O)
        if only_compiling():  # what the comparison will need too
            tiled(x_TI.new_empty(compared_rows(T, weight_OI.shape[0]), inputs), weight_OI, bias_O)
        elif T < MANY_ROWS and library_agrees(T, inputs, weight_OI.shape[0], bias_O is not None, x_TI.device):
            return F.linear(x_TI, weight_OI, bias_O)
    return tiled(x_TI, weight_OI, bias_O)


@cache
def library_agrees(T: int, inputs: int, outputs: int, biased: bool, device: torch.device) -> bool:
    """Whether the library, which is faster, gives this shape the bits of our own matmul: tried when first asked."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    x_XI, weight_OI = random(compared_rows(T, outputs), inputs), random(outputs, inputs)
    bias_O = random(outputs) if biased else None
    theirs_XO = torch.cat([F.linear(x_TI, weight_OI, bias_O) for x_TI in x_XI.split(T)])
    return torch.equal(theirs_XO, tiled(x_XI, weight_OI, bias_O))


def compared_rows(T: int, outputs: int) -> int:
    """Another order of sums changes about one rounded result in three thousand: many must be compared."""
    return T * max(1, min(256, COMPARED // (T * outputs)))


@contextmanager
def no_splitting() -> Iterator[None]:
    """The library's settings for this are the process's; they are put back at once."""
    cuda: Any = torch.backends.cuda
    library = cuda.preferred_blas_library()
    before = (
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    cuda.preferred_blas_library("cublaslt")
    cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        cuda.matmul.allow_bf16_reduced_precision_reduction = before
        cuda.preferred_blas_library(library)


@cache
def can_forbid_splitting() -> bool:
    try:
        with no_splitting():
            F.linear(*(torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    except (AttributeError, RuntimeError, TypeError):  # an older library
        return False
    return True


def tiled(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    T, inputs = x_TI.shape
    outputs = weight_OI.shape[0]
    x_TI, weight_OI = x_TI.contiguous(), weight_OI.contiguous()
    out_TO = torch.empty(T, outputs, dtype=out_dtype or x_TI.dtype, device=x_TI.device)
    if tile is None and gemv.takes(x_TI, outputs):
        gemv.gemv(x_TI, weight_OI, bias_O, out_TO)
        return out_TO
    if tile is None and few_rows.takes(x_TI, weight_OI):
        few_rows.few_rows(x_TI, weight_OI, bias_O, out_TO)
        return out_TO
    wide = x_TI.dtype == torch.float32
    BM, BN, BK, stages, warps = tile or tile_for(T, inputs, outputs, wide)
    overlap = supports_pdl(x_TI.device)
    launch_pdl(
        linear_kernel,
        (triton.cdiv(T, BM) * triton.cdiv(outputs, BN),),
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        T,
        inputs,
        outputs,
        BM=BM,
        BN=BN,
        BK=min(BK, triton.next_power_of_2(max(inputs, 16))),
        STAGES=stages,
        PRECISION="ieee" if wide else "tf32",
        PDL=overlap,
        num_warps=warps,
    )
    return out_TO
