"""Grouped matmuls for Hopper GPUs: one persistent, warp-specialised kernel for all six matmuls of the experts.

One warp copies tiles in with the bulk tensor copy engine; two warpgroups multiply. Each warpgroup owns one half of the
rows of the output tile and neither waits for the other, so while one writes its half out the other keeps the tensor
cores busy; a half with no rows in it (an expert's last tile) is skipped. K is walked in order and never split, so a
row's bits do not depend on the tile shapes or on what else is in the batch. Widths are multiples of STEP: a last tile
that is not whole reads zeros or a neighbour's numbers beyond the edge, and writes nothing there.

    rows      C[rows of e] = A[rows of e] @ B[e]            forward (gate/up, down) and the gradients of activations
    columns   C[e] = A[rows of e]^T @ B[rows of e]          the gradients of weights
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moesaic.kernels.triton.dependent_launch import processors
from moesaic.kernels.triton.experts.hopper.kernel import grouped_matmul
from moesaic.kernels.triton.experts.sort import RECORD, Routing
from moesaic.kernels.triton.launch import launch as launch_kernel

STEP = 64  # elements of K per stage: one 128-byte swizzled row of bf16


@cache
def layout_of(rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Kept: to make one takes longer than all else that a launch needs of the host."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def described(tensor: torch.Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Without what its constructor checks, which takes longer than a launch."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = tensor, tensor.shape, tensor.stride()
    made.block_shape, made.layout, made.padding = block, layout, "zero"
    return made


def tensor_map(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Matrices here are whole tensors of widths that are multiples of STEP, or columns of one."""
    return described(matrix, [rows, columns], layout_of(rows, columns))


def shape_for(width: int, chained: bool = False) -> tuple[int, int]:
    """(rows per warpgroup, columns) of the output tile: 128 x 256, or 256 x 128 where 256 columns do not divide. Where
    neither does, 128 x 256 is a little faster still, unless much of the last tile is empty, or an epilogue follows."""
    if width % 256 == 0 or (width % 128 and not chained and -width % 256 < width // 12):
        return 64, 256
    return 128, 128


def launch(
    a,
    b,
    c_map,
    h_map,
    routing: Routing,
    table: torch.Tensor,
    totals,
    tiles_m: int,
    depth: int,
    width: int,
    stride: int,
    choices: int,
    half: int,
    BN: int,
    group: int,
    stages: int,
    g_map=None,
    chain=(None, None),
    **form: bool,
) -> None:
    device = routing.slots_N.device
    weights, dots = chain
    columns = BN // 2 if form.get("PAIR") else BN  # a pair's tile is as many columns of gate and of up
    launch_kernel(
        grouped_matmul,
        (processors(device),),
        a,
        b,
        c_map,
        h_map,
        g_map,
        weights,
        dots,
        routing.sources_P,
        table,
        totals,
        tiles_m,
        -(-width // columns),
        depth,
        width,
        stride,
        routing.rows,
        CHOICES=choices,
        CUT_ROWS=bool(form.get("COLUMNS")) and depth % half > 0,
        CUT_COLUMNS=width % columns > 0,
        GROUP=group // 2 if half == 128 else group,
        HALF=half,
        BN=BN,
        STEP=STEP,
        STAGES=stages,
        RECORD=RECORD,
        num_warps=4,
        **{
            "GATHER_A": False,
            "GATHER_B": False,
            "COLUMNS": False,
            "B_ROWS": False,
            "PAIR": False,
            "CHAIN": False,
            "SAVE": False,
            **form,
        },
    )


def rows(
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    transposed: bool,
    choices: int = 0,
    group: int = 8,
    stages: int = 4,
) -> torch.Tensor:
    """A's rows times their expert's matrix, stored (E, N, K), or (E, K, N) if `transposed`. With `choices` (experts per
    token) A is in token order and is gathered."""
    K = a.shape[1]
    N = b.shape[2] if transposed else b.shape[1]
    half, BN = shape_for(N)
    c_PN = torch.empty(routing.rows, N, dtype=a.dtype, device=a.device)
    c_map = tensor_map(c_PN, half, BN // 2)
    table, totals = (routing.wide_tiles, routing.totals[1:]) if half == 128 else (routing.tiles, routing.totals)
    launch(
        a if choices else tensor_map(a, half, STEP),
        tensor_map(b.view(-1, b.shape[2]), *((STEP, BN) if transposed else (BN, STEP))),
        c_map,
        c_map,
        routing,
        table,
        totals,
        1,
        K,
        N,
        K,
        choices,
        half,
        BN,
        group,
        stages,
        GATHER_A=choices > 0,
        B_ROWS=not transposed,
    )
    return c_PN


def gate_up(
    x: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    routing: Routing,
    save: bool,
    choices: int = 0,
    group: int = 8,
    stages: int = 4,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(gate and up rows (P, 2F) if `save`, hidden rows (P, F) after SwiGLU). With `choices`, x is in token order."""
    D, G, P = x.shape[1], gate_up_EGD.shape[1], routing.rows
    hidden_PF = torch.empty(P, G // 2, dtype=x.dtype, device=x.device)
    gate_up_PG = torch.empty(P, G, dtype=x.dtype, device=x.device) if save else None
    hidden_map = tensor_map(hidden_PF, 64, 128)
    launch(
        x if choices else tensor_map(x, 64, STEP),
        tensor_map(gate_up_EGD.view(-1, D), 128, STEP),
        hidden_map if gate_up_PG is None else tensor_map(gate_up_PG, 64, 128),
        hidden_map,
        routing,
        routing.tiles,
        routing.totals,
        1,
        D,
        G // 2,
        D,
        choices,
        64,
        256,
        group,
        stages,
        None if gate_up_PG is None else tensor_map(gate_up_PG[:, : G // 2], 64, 128),
        GATHER_A=choices > 0,
        B_ROWS=True,
        PAIR=True,
        SAVE=save,
    )
    return gate_up_PG, hidden_PF


def grad_gate_up(
    grad: torch.Tensor,
    down_EDF: torch.Tensor,
    gate_up_PG: torch.Tensor,
    weights_TK: torch.Tensor,
    routing: Routing,
    in_place: bool,
    gathered: bool,
    group: int = 8,
    stages: int = 3,
):
    """Back through down and SwiGLU: the gradients of gate and up (in their place, if so asked), the weighted hidden
    rows, and the routing weights' gradients in one part per 64 columns, (parts, P). `gathered`: grad is in token
    order."""
    D, F, P = down_EDF.shape[1], down_EDF.shape[2], routing.rows
    half, BN = shape_for(F, chained=True)
    hidden_PF = torch.empty(P, F, dtype=grad.dtype, device=grad.device)
    grad_PG = gate_up_PG if in_place else torch.empty_like(gate_up_PG)
    dots = torch.empty(F // STEP, P, dtype=torch.float32, device=grad.device)
    table, totals = (routing.wide_tiles, routing.totals[1:]) if half == 128 else (routing.tiles, routing.totals)
    launch(
        grad if gathered else tensor_map(grad, half, STEP),
        tensor_map(down_EDF.view(-1, F), STEP, BN),
        tensor_map(grad_PG, half, STEP),
        tensor_map(hidden_PF, half, STEP),
        routing,
        table,
        totals,
        1,
        D,
        F,
        D,
        weights_TK.shape[1],
        half,
        BN,
        group,
        stages,
        tensor_map(gate_up_PG, half, STEP),
        (weights_TK, dots),
        GATHER_A=gathered,
        CHAIN=True,
    )
    return grad_PG, hidden_PF, dots


def columns(
    a: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    gather_a: bool = False,
    gather_b: bool = False,
    choices: int = 0,
    group: int = 8,
    stages: int = 4,
) -> torch.Tensor:
    """For each expert, the matmul of A's rows, transposed, with B's: (E, M, N). Padding in A or B, where it is not
    gathered, must be zero."""
    M, N, E = a.shape[1], b.shape[1], routing.segments_E.shape[0]
    half, BN = shape_for(N)
    assert not ((gather_a and M % half) or (gather_b and N % BN)), "what is gathered is whole tiles wide"
    c_EMN = torch.empty(E, M, N, dtype=a.dtype, device=a.device)
    c_map = tensor_map(c_EMN.view(-1, N), 64 if M % half else half, BN // 2)
    launch(
        a if gather_a else tensor_map(a, STEP, half),
        b if gather_b else tensor_map(b, STEP, BN),
        c_map,
        c_map,
        routing,
        routing.segments_E,
        E,
        -(-M // (2 * half)),
        M,
        N,
        M if gather_a else N,
        choices,
        half,
        BN,
        group,
        stages,
        GATHER_A=gather_a,
        GATHER_B=gather_b,
        COLUMNS=True,
    )
    return c_EMN
