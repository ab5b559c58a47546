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
from moesaic.kernels.triton.float8.rounding import Rounded
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
    rows: Rounded,
    weight: Rounded,
    bias_O: torch.Tensor | None = None,
    routing: Routing | None = None,
    tile: Tile = Tile(),  # noqa: B008  it cannot be changed
) -> torch.Tensor:
    """Rows times their expert's matrix, or the only one, in bfloat16."""
    P, outputs = rows.numbers.shape[0], weight.numbers.shape[1]
    out_PO = torch.empty(P, outputs, dtype=torch.bfloat16, device=rows.numbers.device)
    if P:
        _launch(rows, weight, bias_O, routing, tile, out_PO, None)
    return out_PO


def gate_up(
    rows: Rounded,
    weight: Rounded,
    routing: Routing,
    save: bool,
    tile: Tile = Tile(),  # noqa: B008  it cannot be changed
) -> tuple[torch.Tensor | None, Rounded]:
    """(gate and up rows (P, 2F) if `save`, hidden rows after SwiGLU, rounded)."""
    P, F, device = rows.numbers.shape[0], weight.numbers.shape[1] // 2, rows.numbers.device
    assert F % BLOCK == 0, "a tile is whole blocks of gate and of up"
    gate_up_PG = torch.empty(P, 2 * F, dtype=torch.bfloat16, device=device) if save else None
    hidden = Rounded(
        torch.empty(P, F, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(F // BLOCK, rows.scales.shape[1], dtype=torch.float32, device=device),
    )
    _launch(rows, weight, None, routing, tile, gate_up_PG, hidden)
    return gate_up_PG, hidden


def _launch(
    rows: Rounded,
    weight: Rounded,
    bias_O: torch.Tensor | None,
    routing: Routing | None,
    tile: Tile,
    out_PO: torch.Tensor | None,
    hidden: Rounded | None,
) -> None:
    (P, inputs), half = rows.numbers.shape, tile.rows // 2
    outputs, pair = weight.numbers.shape[1], hidden is not None
    assert not pair or (half, tile.columns) == (64, 256)
    table = totals = None
    if routing is not None:
        wide = tile.rows != routing.align
        assert tile.rows == (2 if wide else 1) * routing.align
        table, totals = (routing.wide_tiles, routing.totals[1:]) if wide else (routing.tiles, routing.totals)
    if hidden is None:
        assert out_PO is not None
        out_map = hidden_map = tensor_map(out_PO, 64)
    else:
        hidden_map = tensor_map(hidden.numbers, 64)
        # Where nothing is saved: any map of the right form.
        out_map = tensor_map(hidden.numbers.view(torch.bfloat16) if out_PO is None else out_PO, 64)
    columns = 128 if pair else tile.columns  # of the weight, and a pair's as many of gate and of up
    width = outputs // 2 if pair else outputs
    launch(
        float8_matmul,
        (processors(rows.numbers.device),),
        tensor_map(rows.numbers, half),
        tensor_map(weight.numbers.view(-1, inputs), columns),
        out_map,
        hidden_map,
        rows.scales,
        weight.scales,
        bias_O,
        None if hidden is None else hidden.scales,
        table,
        totals,
        triton.cdiv(P, tile.rows),
        triton.cdiv(width, columns),
        P,
        rows.scales.shape[1],
        weight.scales.shape[2],
        weight.scales.shape[1],
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
