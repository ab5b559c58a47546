"""Float8 matmuls of many rows on Hopper: a persistent, warp-specialised kernel (DeepSeek-V3's scaling, as DeepGEMM).

One warp copies tiles in with the bulk tensor copy engine; two warpgroups multiply, and add each sum of 128 inputs,
scaled, in float32, one of them while the tensor cores work for the other. A tile of 128 rows x 256 columns reads 48 KB
from the L2 cache per 8.4 million operations. K is walked in order and never split, and sums are made as in
`float8/matmul.py`, with the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moesaic.kernels.float8 import BLOCK
from moesaic.kernels.triton.dependent_launch import processors
from moesaic.kernels.triton.experts.sort import RECORD, Routing
from moesaic.kernels.triton.float8.hopper.kernel import float8_matmul
from moesaic.kernels.triton.launch import launch

ALIGN = 64  # rows to which an expert's are padded: a tile is twice as many
KINDS = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Tile:
    """Of the output, for both warpgroups."""

    rows: int = 128
    columns: int = 256
    stages: int = 4
    group: int = 16  # tiles of rows that walk the columns together, for the L2 cache


@cache
def layout_of(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Kept: to make one takes longer than all else that a launch needs of the host."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], KINDS[dtype])


def tensor_map(matrix: torch.Tensor, rows: int, columns: int = 128) -> TensorDescriptor:
    """Without what its constructor checks, which takes longer than a launch."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = matrix, matrix.shape, matrix.stride()
    made.block_shape, made.layout, made.padding = [rows, columns], layout_of(rows, columns, matrix.dtype), "zero"
    return made


def matmul(
    x8_PI: torch.Tensor,
    scales_GP: torch.Tensor,
    weight_EOI: torch.Tensor,
    scales_ENG: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    routing: Routing | None = None,
    tile: Tile = Tile(),  # noqa: B008  it cannot be changed
) -> torch.Tensor:
    """Rows times their expert's matrix, or the only one, in bfloat16. Scales of rows are one row per group, at least as
    long as a whole number of tiles."""
    P, outputs = x8_PI.shape[0], weight_EOI.shape[1]
    out_PO = torch.empty(P, outputs, dtype=torch.bfloat16, device=x8_PI.device)
    if P:
        _launch(x8_PI, scales_GP, weight_EOI, scales_ENG, bias_O, routing, tile, outputs, out_PO, None, None)
    return out_PO


def gate_up(
    x8_PI: torch.Tensor,
    scales_GP: torch.Tensor,
    weight_EGD: torch.Tensor,
    scales_ENG: torch.Tensor,
    routing: Routing,
    save: bool,
    tile: Tile = Tile(),  # noqa: B008  it cannot be changed
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(gate and up rows (P, 2F) if `save`, hidden rows after SwiGLU rounded to float8, their scales)."""
    P, F = x8_PI.shape[0], weight_EGD.shape[1] // 2
    assert F % BLOCK == 0, "a tile is whole blocks of gate and of up"
    hidden_PF = torch.empty(P, F, dtype=torch.float8_e4m3fn, device=x8_PI.device)
    hidden_scales_GP = torch.empty(F // BLOCK, scales_GP.shape[1], dtype=torch.float32, device=x8_PI.device)
    gate_up_PG = torch.empty(P, 2 * F, dtype=torch.bfloat16, device=x8_PI.device) if save else None
    made = gate_up_PG, hidden_PF, hidden_scales_GP
    _launch(x8_PI, scales_GP, weight_EGD, scales_ENG, None, routing, tile, F, *made)
    return made


def _launch(
    x8_PI, scales_GP, weight_EOI, scales_ENG, bias_O, routing, tile: Tile, width: int, out_PO, hidden_PF, hidden_GP
) -> None:
    (P, inputs), half = x8_PI.shape, tile.rows // 2
    pair = hidden_PF is not None
    assert not pair or (half, tile.columns) == (64, 256)
    table = totals = None
    if routing is not None:
        wide = tile.rows != routing.align
        assert tile.rows == (2 if wide else 1) * routing.align
        table, totals = (routing.wide_tiles, routing.totals[1:]) if wide else (routing.tiles, routing.totals)
    if out_PO is None:  # nothing is written: any map of the right form
        out_map = tensor_map(hidden_PF.view(torch.bfloat16), 64)
    else:
        out_map = tensor_map(out_PO, 64)
    launch(
        float8_matmul,
        (processors(x8_PI.device),),
        tensor_map(x8_PI, half),
        tensor_map(weight_EOI.view(-1, inputs), 128 if pair else tile.columns),
        out_map,
        tensor_map(hidden_PF, 64) if pair else out_map,
        scales_GP,
        scales_ENG,
        bias_O,
        hidden_GP,
        table,
        totals,
        triton.cdiv(P, tile.rows),
        triton.cdiv(width, 128 if pair else tile.columns),
        P,
        scales_GP.shape[1],
        scales_ENG.shape[2],
        scales_ENG.shape[1],
        width,
        GROUPED=routing is not None,
        PAIR=pair,
        SAVE=pair and out_PO is not None,
        GROUP=tile.group,
        HALF=half,
        BN=tile.columns,
        STAGES=tile.stages,
        RECORD=RECORD,
        num_warps=4,
    )
