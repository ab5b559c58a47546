"""Sums of each 64 inputs, which zero points are multiplied by: made once for all rows of weights."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moesaic.kernels.triton.experts.hopper.grouped import described
from moesaic.kernels.triton.launch import launch

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@triton.jit
def sums_kernel(x_PI, sums_GP, P, INPUTS, stride, BM: tl.constexpr):
    """As tensor cores add them: with ones, in their order."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, 64)
    ones = tl.full([16, 64], 1.0, x_PI.dtype.element_ty)
    for step in range(0, INPUTS, 64):
        at = x_PI + row.to(tl.int64)[None, :] * INPUTS + step + j[:, None]
        x = tl.load(at, mask=(row < P)[None, :], other=0.0)
        sum = tl.max(tl.dot(ones, x), 0)  # its rows are alike
        to = sums_GP + (step // 64).to(tl.int64) * stride + row  # type: ignore[attr-defined]
        tl.store(to, sum, mask=row < stride)


def sums_map(x_PI: torch.Tensor, rows: int) -> tuple[TensorDescriptor, int]:
    """A tensor map of `rows` sums after each other, and how far apart are those of the same row."""
    P, inputs = x_PI.shape
    stride = -(-P // 4) * 4  # whole 16 bytes
    sums_GP = torch.empty(inputs // 64, stride, dtype=torch.float32, device=x_PI.device)
    launch(sums_kernel, (triton.cdiv(P, 64),), x_PI, sums_GP, P, inputs, stride, BM=64, num_warps=4)
    return described(sums_GP.view(-1), [rows], LAYOUT), stride
