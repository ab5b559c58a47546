"""Up to eight rows times a matrix: what takes the time is reading the matrix, so the memory must never be idle.

A program has some columns, whose weights go through a ring of stages in shared memory; the first are on their way
before the program waits for the launch before it. So while one part is multiplied the next ones arrive, which a program
that first loads all of its weights (`gemv`) cannot do where they do not all fit at once. K is walked in order, sixteen
inputs at a time: the bits of `linear`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import is_hopper, launch_pdl, processors
from moesaic.kernels.triton.experts.hopper.copies import row_load

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

MAX_ROWS = 8  # the columns of the shortest matmul of the tensor cores
COLUMNS = 16  # of a warp: its rows
SHARED = 227 * 1024  # bytes a processor has for its programs, each of which costs another thousand
SHORT = 2048  # inputs up to which most of a program's weights are there when the row is


@gluon.jit
def few_rows_kernel(
    x_TI,
    weight_OI,
    bias_O,
    out_TO,
    T,
    OUTPUTS,
    INPUTS,
    steps,
    ROWS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Weights are the first operand, rows the second: one that is alone is all of them. `CUT`: INPUTS are no whole
    number of steps, and what is beyond them is zero."""
    kind: gl.constexpr = weight_OI.dtype.element_ty
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    column = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, copied))
    k = gl.arange(0, BK, gl.SliceLayout(0, copied))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    # Columns beyond the last are copies of it, and not kept.
    weight_at = weight_OI + (gl.minimum(column, OUTPUTS - 1).to(gl.int64) * INPUTS)[:, None] + k[None, :]
    x_at = x_TI + (row * INPUTS)[:, None] + k[None, :]
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_shared: gl.constexpr = swizzled if ROWS > 1 else gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = gl.allocate_shared_memory(kind, [STAGES, BN, BK], swizzled)
    x = gl.allocate_shared_memory(kind, [STAGES, ROWS, BK], x_shared)
    for step in gl.static_range(STAGES):
        if CUT:
            row_load(weights.index(step), weight_at + step * BK, mask=(k < INPUTS - step * BK)[None, :])
        else:
            row_load(weights.index(step), weight_at + step * BK)
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Not as copies: those end in the order they began, and these would come after all of the weights. All are asked for
    # before the first is waited for.
    parts = ()
    for step in gl.static_range(STAGES):
        inside = (row < T)[:, None] & (k < INPUTS - step * BK)[None, :]
        parts = parts + (gl.load(x_at + step * BK, mask=inside, other=0.0),)  # type: ignore[assignment]
    for step in gl.static_range(STAGES):
        x.index(step).store(parts[step])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    first: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    second: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    total = gl.zeros([BN, 8], gl.float32, sums)
    stage = 0
    for step in range(steps):
        async_copy.wait_group(STAGES - 1)
        barrier()
        rows = x.index(stage).permute((1, 0)).load(second)
        if ROWS == 1:
            rows = rows.broadcast_to([BK, 8])
        total = mma_v2(weights.index(stage).load(first), rows, total)
        barrier()  # all have read what is overwritten now
        ahead = (step + STAGES) * BK
        if step + STAGES < steps:
            if CUT:
                left = (k < INPUTS - ahead)[None, :]
                row_load(weights.index(stage), weight_at + ahead, mask=left)
                row_load(x.index(stage), x_at + ahead, mask=(row < T)[:, None] & left)
            else:
                row_load(weights.index(stage), weight_at + ahead)
                row_load(x.index(stage), x_at + ahead, mask=(row < T)[:, None])
        async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    n = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, sums))
    t = gl.arange(0, 8, gl.SliceLayout(0, sums))
    if bias_O is not None:
        total += gl.load(bias_O + gl.minimum(n, OUTPUTS - 1)).to(gl.float32)[:, None]
    kept = (n < OUTPUTS)[:, None] & (t < T)[None, :]
    gl.store(out_TO + n[:, None] + (t * OUTPUTS)[None, :], total.to(out_TO.dtype.element_ty), mask=kept)


@dataclass(frozen=True)
class Ring:
    warps: int
    step: int  # inputs of a stage
    stages: int


@cache
def ring_for(T: int, inputs: int, outputs: int, processors: int) -> Ring:
    """All programs of a launch should run at once, as many on one processor as on another: then none waits for a place,
    and none is alone with its processor at the end. Programs of the launch before leave holes where more would fit
    than should, so each takes its share of the shared memory, whether that many stages help or not. Where there are too
    many for that, or inputs are few, two wide ones share a processor. Measured on an H200."""
    rows = 1 if T == 1 else MAX_ROWS

    def each(warps: int) -> int:
        """Programs on one processor."""
        return triton.cdiv(triton.cdiv(outputs, COLUMNS * warps), processors)

    def stages(warps: int, programs: int, step: int) -> int:
        return (SHARED // programs - 1024) // ((COLUMNS * warps + rows) * step * 2)

    def balance(warps: int) -> float:
        """How much of the processors' time has work; one warp cannot multiply as fast as its processor reads."""
        if stages(warps, each(warps), 128) < 5 or each(warps) * warps < 2:
            return 0.0
        return outputs / (COLUMNS * warps * each(warps) * processors)

    warps = 4 if inputs <= SHORT else max((4, 2, 1), key=balance)
    programs = each(warps) if inputs > SHORT and balance(warps) else min(each(warps), 2)
    step = 256 if stages(warps, programs, 256) >= 6 else 128
    return Ring(warps, step, min(triton.cdiv(inputs, step), 24, stages(warps, programs, step)))


def takes(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    T, inputs = x_TI.shape
    wide = T <= MAX_ROWS and inputs >= 1024 and inputs % 16 == 0 and weight_OI.shape[0] >= 512
    aligned = x_TI.data_ptr() % 16 == 0 and weight_OI.data_ptr() % 16 == 0
    return wide and aligned and x_TI.dtype == weight_OI.dtype == torch.bfloat16 and is_hopper(x_TI.device)


def few_rows(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    ring: Ring | None = None,
) -> None:
    (T, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    ring = ring or ring_for(T, inputs, outputs, processors(x_TI.device))
    launch_pdl(
        few_rows_kernel,
        (triton.cdiv(outputs, COLUMNS * ring.warps),),
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        T,
        outputs,
        inputs,
        triton.cdiv(inputs, ring.step),
        ROWS=1 if T == 1 else MAX_ROWS,
        BN=COLUMNS * ring.warps,
        BK=ring.step,
        STAGES=ring.stages,
        CUT=inputs % ring.step > 0,
        WARPS=ring.warps,
        PDL=True,
        num_warps=ring.warps,
    )
