"""Matmuls of float8 weights with inputs rounded to float8: blocks of 128 x 128 weights have a scale, and so have each
128 inputs of a row (DeepSeek-V3's recipe).

    x8_TI, scales_TG = round_rows(x_TI)
    matmul(x8_TI, scales_TG, weight_EOI, scales_ENG, torch.bfloat16)

Weights are the first operand, so that tensor cores are used in one way however few rows there are. The sum of 128
inputs is scaled and added in float32, in order: a row's bits are the same alone and in any batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.kernels.float8 import BLOCK
from moesaic.kernels.triton.experts.sort import RECORD, Routing
from moesaic.kernels.triton.launch import launch

GROUPS = 8  # of inputs that a program rounds
MIN_ROWS, MAX_ROWS = (
    16,
    64,
)  # of a tile, measured on an H200: with 128 fewer programs fit, and none hides another's waits


@triton.jit
def round_kernel(x_TI, up_TI, x8_TI, scales_TG, INPUTS, STRIDE, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Of SiLU(x) * up, where there is an `up`: both are STRIDE apart from row to row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_TI + row * STRIDE + column, mask=column < INPUTS, other=0.0).to(tl.float32)
    if up_TI is not None:
        kind = x_TI.dtype.element_ty
        up = tl.load(up_TI + row * STRIDE + column, mask=column < INPUTS, other=0.0).to(tl.float32)
        x = ((x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32) * up).to(kind).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12)
    tl.store(x8_TI + row * INPUTS + column, (x / scale[:, None]).to(tl.float8e4nv), mask=column < INPUTS)
    groups = tl.cdiv(INPUTS, BLOCK)
    tl.store(scales_TG + row * groups + group, scale, mask=group < groups)


@triton.jit
def matmul_kernel(
    x8_PI,
    scales_PG,
    weight_EOI,
    scales_ENG,
    bias_O,
    out_PO,
    tiles,
    totals,
    routes_N,
    P,
    INPUTS,
    OUTPUTS,
    CHOICES,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of rows times their matrix: that of the table, or (`routes_N`) of the only row of each tile, which is an
    assignment of the row `assignment // CHOICES`; without either, all rows times the only one."""
    tile = tl.program_id(0)
    used = tl.cdiv(P, ROWS)
    if tiles is not None:
        used = tl.load(totals)
    if routes_N is not None:
        used = P
    if tile < used:
        row = tl.arange(0, ROWS).to(tl.int64)
        expert = tl.zeros([], tl.int64)
        if routes_N is not None:
            expert += tl.load(routes_N + tile)
            stored = row == 0
            valid = stored & (expert >= 0)  # an assignment to nobody gives zeros
            out_row = row + tile
            row += tile // CHOICES
            expert = tl.maximum(expert, 0)
        elif tiles is not None:
            record = tiles + tile * RECORD
            expert += tl.load(record)
            row += (tile - tl.load(record + 1)) * ROWS
            valid = row < tl.load(record + 4)
            row += tl.load(record + 3)
            out_row, stored = row, valid
        else:
            row += tile * ROWS
            valid = row < P
            out_row, stored = row, valid
        block = tl.program_id(1)
        n = block * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, BLOCK)
        groups = tl.cdiv(INPUTS, BLOCK)
        x_at = x8_PI + row[None, :] * INPUTS + k[:, None]
        weight_at = weight_EOI + (expert * OUTPUTS + n[:, None]) * INPUTS + k[None, :]
        scales_at = scales_ENG + (expert * tl.cdiv(OUTPUTS, BLOCK) + block) * groups
        total = tl.zeros([BLOCK, ROWS], tl.float32)
        for group in tl.range(0, groups, num_stages=STAGES):
            inside = k < INPUTS - group * BLOCK
            weight = tl.load(weight_at, mask=(n[:, None] < OUTPUTS) & inside[None, :], other=0.0)
            x8 = tl.load(x_at, mask=valid[None, :] & inside[:, None], other=0.0)
            scale = tl.load(scales_PG + row * groups + group, mask=valid, other=0.0) * tl.load(scales_at + group)
            total = tl.fma(tl.dot(weight, x8), tl.broadcast_to(scale[None, :], (BLOCK, ROWS)), total)
            x_at += BLOCK
            weight_at += BLOCK
        if bias_O is not None:
            total += tl.load(bias_O + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        out_at = out_PO + out_row[None, :] * OUTPUTS + n[:, None]
        tl.store(out_at, total.to(out_PO.dtype.element_ty), mask=stored[None, :] & (n[:, None] < OUTPUTS))


def round_rows(x_TI: torch.Tensor, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales; of SiLU(gate) * up, where rows are `gated` and hold both."""
    T, width = x_TI.shape
    inputs = width // 2 if gated else width
    x8_TI = torch.empty(T, inputs, dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_TG = torch.empty(T, triton.cdiv(inputs, BLOCK), dtype=torch.float32, device=x_TI.device)
    if T:
        x_TI = x_TI.contiguous()
        launch(
            round_kernel,
            (T, triton.cdiv(inputs, GROUPS * BLOCK)),
            x_TI,
            x_TI[:, inputs:] if gated else None,
            x8_TI,
            scales_TG,
            inputs,
            width,
            GROUPS=GROUPS,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return x8_TI, scales_TG


def tile_rows(mean: int) -> int:
    """Rows of a tile, for so many rows of a matrix: most experts then have one tile."""
    return min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(3 * mean // 2)))


def matmul(
    x8_PI: torch.Tensor,
    scales_PG: torch.Tensor,
    weight_EOI: torch.Tensor,
    scales_ENG: torch.Tensor,
    dtype: torch.dtype,
    bias_O: torch.Tensor | None = None,
    routing: Routing | None = None,
    routes_TK: torch.Tensor | None = None,
    choices: int = 1,
) -> torch.Tensor:
    """With a `routing`, rows are sorted by expert. With `routes_TK`, there is a row out for every assignment, in their
    order, and a row in for every `choices` of them."""
    (P, inputs), outputs = x8_PI.shape, weight_EOI.shape[1]
    if routes_TK is not None:
        P, rows = routes_TK.numel(), MIN_ROWS
        count = P
    elif routing is not None:
        rows, count = routing.align, routing.tiles.shape[0]
    else:
        rows = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(P)))
        count = triton.cdiv(P, rows)
    out_PO = torch.empty(P, outputs, dtype=dtype, device=x8_PI.device)
    if P:
        launch(
            matmul_kernel,
            (count, triton.cdiv(outputs, BLOCK)),
            x8_PI,
            scales_PG,
            weight_EOI,
            scales_ENG,
            bias_O,
            out_PO,
            None if routing is None else routing.tiles,
            None if routing is None else routing.totals,
            routes_TK,
            P,
            inputs,
            outputs,
            choices,
            ROWS=rows,
            BLOCK=BLOCK,
            RECORD=RECORD,
            STAGES=3,
            num_warps=4,
        )
    return out_PO
