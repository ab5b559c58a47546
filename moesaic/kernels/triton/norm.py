"""RMS normalisation of rows, after additions to them where there are some."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl


@triton.jit
def norm_kernel(x_TD, more_TD, also_TD, weight_D, sum_TD, out_TD, D, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_D + column, mask=column < D, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * D + column
    x = tl.load(x_TD + at, mask=column < D, other=0.0).to(tl.float32)
    kind = out_TD.dtype.element_ty
    if more_TD is not None:
        more = tl.load(more_TD + at, mask=column < D, other=0.0).to(tl.float32)
        if also_TD is not None:
            more = (more + tl.load(also_TD + at, mask=column < D, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        x = (x + more).to(kind)
        tl.store(sum_TD + at, x, mask=column < D)
        x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(out_TD + at, x.to(kind) * weight.to(kind), mask=column < D)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension; one program per row, so a row's bits are its own."""
    return _norm(x_TD, None, None, weight_D, eps)[1]


def add_and_norm(
    x_TD: torch.Tensor, more_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, also_TD: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + (more + also), the norm of that)."""
    return _norm(x_TD, more_TD, also_TD, weight_D, eps)


def _norm(
    x_TD: torch.Tensor,
    more_TD: torch.Tensor | None,
    also_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    D = x_TD.shape[-1]
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if more_TD is None else torch.empty_like(x_TD)
    if x_TD.numel():
        launch_pdl(
            norm_kernel,
            (x_TD.numel() // D,),
            x_TD,
            more_TD,
            also_TD,
            weight_D,
            sum_TD,
            out_TD,
            D,
            eps,
            BLOCK=triton.next_power_of_2(D),
            PDL=supports_pdl(x_TD.device),
            num_warps=4 if D <= 2048 else 8,
        )
    return sum_TD, out_TD
