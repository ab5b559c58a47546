"""GEMV, one row times a matrix: the weights are on their way before the row is there.

A program has a few columns, and all of their weights fit into shared memory: it asks for them, and only then waits for
the launch before it. What is left after that is one chain of matmuls along K, in the order of `linear`: the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import is_hopper, launch_pdl
from moesaic.kernels.triton.experts.hopper.copies import row_load

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

COLUMNS = 8  # of a warp; the shortest matmul of the tensor cores has the shortest chain
WARPS = 1  # measured on an H200: with two, as few outputs as these would leave processors without a program
STEP = 256  # inputs
MAX_INPUTS = 6144  # 96 KB of weights for one warp: two programs on a processor
MAX_OUTPUTS = 2048  # beyond that `few_rows` is faster: programs would wait for places, and the memory for them


@gluon.jit
def gemv_kernel(
    x_I,
    weight_OI,
    bias_O,
    out_O,
    OUTPUTS,
    half,
    INPUTS: gl.constexpr,
    PADDED: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The row is all rows of the first operand; of the result one is kept. Work begins when the first half of the
    weights is there. `PADDED` is the row: a power of two."""
    kind: gl.constexpr = weight_OI.dtype.element_ty
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    column = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, copied))
    k = gl.arange(0, BK, gl.SliceLayout(0, copied))
    # Columns beyond the last are copies of it, and not kept.
    weight_at = weight_OI + (gl.minimum(column, OUTPUTS - 1).to(gl.int64) * INPUTS)[:, None] + k[None, :]
    weights = gl.allocate_shared_memory(kind, [INPUTS // BK, BN, BK], gl.NVMMASharedLayout(128, 16, 2))
    for part in gl.static_range(2):
        for step in range(part * half, part * half + half):
            row_load(weights.index(step), weight_at + step * BK)
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = gl.arange(0, PADDED, gl.BlockedLayout([8], [32], [WARPS], [0]))
    row = gl.load(x_I + i, mask=i < INPUTS, other=0.0)
    x_flat = gl.allocate_shared_memory(kind, [PADDED], gl.SwizzledSharedLayout(1, 1, 1, [0]), row)
    x = x_flat._reinterpret(kind, [PADDED // BK, 1, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    first: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    second: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    total = gl.zeros([16, BN], gl.float32, sums)
    for part in gl.static_range(2):
        async_copy.wait_group(1 - part)
        barrier()
        for step in range(part * half, part * half + half):
            rows = x.index(step).load(first).broadcast_to([16, BK])
            total = mma_v2(rows, weights.index(step).permute((1, 0)).load(second), total)
    n = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(0, sums))
    m = gl.arange(0, 16, gl.SliceLayout(1, sums))
    if bias_O is not None:
        total += gl.load(bias_O + gl.minimum(n, OUTPUTS - 1)).to(gl.float32)[None, :]
    kept = (m == 0)[:, None] & (n < OUTPUTS)[None, :]
    gl.store(out_O + n[None, :] + 0 * m[:, None], total.to(out_O.dtype.element_ty), mask=kept)


def takes(x_TI: torch.Tensor, outputs: int) -> bool:
    T, inputs = x_TI.shape
    small = T == 1 and inputs <= MAX_INPUTS and inputs % (2 * STEP) == 0 and outputs <= MAX_OUTPUTS
    return small and x_TI.dtype == torch.bfloat16 and is_hopper(x_TI.device)


def gemv(x_1I: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_1O: torch.Tensor) -> None:
    outputs, inputs = weight_OI.shape
    launch_pdl(
        gemv_kernel,
        (triton.cdiv(outputs, COLUMNS * WARPS),),
        x_1I,
        weight_OI,
        bias_O,
        out_1O,
        outputs,
        inputs // STEP // 2,
        INPUTS=inputs,
        PADDED=triton.next_power_of_2(inputs),
        BN=COLUMNS * WARPS,
        BK=STEP,
        WARPS=WARPS,
        PDL=True,
        num_warps=WARPS,
    )
