"""The second launch of `decode` on Hopper: its weights are on their way before the rows they multiply are there.

A program's weights go through a ring of stages in shared memory, which is filled before the program waits for the
launch before it; so the memory is never idle between the two. Matmuls and sums are those of `decode.output_kernel`,
to the bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl
from moesaic.kernels.triton.experts.hopper.copies import row_load

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed after triton 3.6

ROWS = 64  # of weights at a time: what the tensor cores multiply at once
LANES = 8  # columns of a matmul, one for each choice
MOST = 32  # steps, all of whose hidden numbers lie in shared memory


@gluon.jit
def output_kernel(
    hidden_NF,
    routes_N,
    weights_N,
    down_EDF,
    out_TD,
    D,
    F,
    K: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    LANES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Rows of the matmul are (choice, n), its lanes the choices; of each row the lane of its own choice is kept."""
    token, block = gl.program_id(0).to(gl.int64), gl.program_id(1)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    k = gl.arange(0, BK, gl.SliceLayout(0, copied))
    expert = gl.maximum(gl.load(routes_N + token * K + gl.minimum(row // BN, K - 1)), 0).to(gl.int64)
    down_at = down_EDF + ((expert * D + block * BN + row % BN) * F)[:, None] + k[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    down = gl.allocate_shared_memory(down_EDF.dtype.element_ty, [STAGES, ROWS, BK], shared)
    hidden = gl.allocate_shared_memory(down_EDF.dtype.element_ty, [STEPS, LANES, BK], shared)
    for step in gl.static_range(STAGES):
        row_load(down.index(step), down_at + step * BK)
        async_copy.commit_group()
    lane = gl.minimum(gl.arange(0, LANES, gl.SliceLayout(1, copied)), K - 1)
    hidden_at = hidden_NF + ((token * K + lane) * F)[:, None] + k[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for step in gl.static_range(STEPS):
        row_load(hidden.index(step), hidden_at + step * BK)
    async_copy.commit_group()
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, LANES, 16])
    total = gl.zeros([ROWS, LANES], gl.float32, sums)
    for step in gl.static_range(STEPS):
        # Groups end in the order they began: the hidden rows' is the one after the first STAGES.
        async_copy.wait_group(min(step, STAGES - 1) if STEPS > STAGES else 0)
        fence_async_shared()
        barrier()
        total = warpgroup_mma(down.index(step % STAGES), hidden.index(step).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        if STEPS > STAGES:
            barrier()  # all have read what is overwritten now
            if step + STAGES < STEPS:
                row_load(down.index(step % STAGES), down_at + (step + STAGES) * BK)
            async_copy.commit_group()
    choice = gl.arange(0, ROWS, gl.SliceLayout(1, sums)) // BN
    lane = gl.arange(0, LANES, gl.SliceLayout(0, sums))
    own = gl.sum(gl.where(lane[None, :] == choice[:, None], total, 0.0), 1)
    own = own.to(out_TD.dtype.element_ty).to(gl.float32)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wide: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    by_choice = gl.reshape(gl.convert_layout(own, flat), [ROWS // BN, BN])
    kept = gl.allocate_shared_memory(
        gl.float32, [ROWS // BN, BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), gl.convert_layout(by_choice, wide)
    )
    barrier()
    out = gl.zeros([1, BN], gl.float32, wide)
    for j in gl.static_range(K):
        out += gl.load(weights_N + token * K + j) * kept.slice(j, 1, 0).load(wide)
    n = block * BN + gl.arange(0, BN, gl.SliceLayout(0, wide))
    gl.store(out_TD + token * D + n[None, :], out.to(out_TD.dtype.element_ty))


def takes(D: int, F: int, K: int, dtype: torch.dtype) -> bool:
    return K == LANES and dtype == torch.bfloat16 and D % (ROWS // LANES) == 0 and F % 64 == 0 and F // step(F) <= MOST


def step(F: int) -> int:
    return 128 if F % 128 == 0 else 64


def output(
    hidden_NF: torch.Tensor,
    routes_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    down_EDF: torch.Tensor,
    out_TD: torch.Tensor,
) -> None:
    (T, D), K, F = out_TD.shape, routes_TK.shape[1], down_EDF.shape[2]
    BN, BK = ROWS // LANES, step(F)
    launch_pdl(
        output_kernel,
        (T, D // BN),
        hidden_NF,
        routes_TK,
        weights_TK,
        down_EDF,
        out_TD,
        D,
        F,
        K=K,
        BN=BN,
        BK=BK,
        STEPS=F // BK,
        STAGES=min(640 // BK, F // BK),
        ROWS=ROWS,
        LANES=LANES,
        PDL=True,
        num_warps=4,
    )
