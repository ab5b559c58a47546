"""Matmuls of many rows with weights of 4 or 8 bits on Hopper: linear maps, and the two of experts.

The transposed problem: rows of weights times rows of x, so that weights are the tensor cores' first operand, which may
come from registers. One warp copies codes and x to shared memory; two warpgroups read codes to registers, unpack them,
multiply, and add sums of 64 inputs, scaled, to their tile: 64 rows of weights by 128 of x, or 64 where there are no
more. Results have the bits of the other kernels (`matmul_kernels.py` says why they can).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moesaic.kernels.interface import Routes
from moesaic.kernels.triton.dependent_launch import is_hopper, processors
from moesaic.kernels.triton.experts import rows
from moesaic.kernels.triton.experts.hopper.grouped import described, tensor_map
from moesaic.kernels.triton.experts.sort import RECORD, Routing, route
from moesaic.kernels.triton.launch import launch
from moesaic.kernels.triton.quantized.hopper.kernel import quantized_matmul
from moesaic.kernels.triton.quantized.hopper.sums import sums_map
from moesaic.kernels.triton.quantized.packed_weight import PackedWeight

TILE = 128  # rows of x
CODES = {rows: gl.NVMMASharedLayout.get_default_for([rows, 16], gl.int32) for rows in (32, 64)}


def takes(x_TI: torch.Tensor, *weights: PackedWeight) -> bool:
    """What tensor maps can describe, in bf16, with 64 inputs to a sum."""
    known = all(one.half_width == 64 and one.shape[-2] >= 128 and one.shape[-2] % 16 == 0 for one in weights)
    return known and x_TI.dtype == torch.bfloat16 and is_hopper(x_TI.device) and x_TI.data_ptr() % 16 == 0


def codes_map(weight: PackedWeight, rows: int) -> TensorDescriptor:
    """Of sixteen words of so many rows."""
    codes = weight.codes_EOB.view(torch.int32).flatten(0, 1)
    return described(codes, [rows, 16], CODES[rows])


def matmul(
    x_PI: torch.Tensor,
    weight: PackedWeight,
    bias_O: torch.Tensor | None = None,
    routing: Routing | None = None,
    pair: bool = False,
) -> torch.Tensor:
    """Rows times their expert's matrix, or all rows times the only one. With `pair`, rows of weights are those of gate,
    then those of up, and the result is hidden rows after SwiGLU."""
    P, inputs = x_PI.shape
    outputs = weight.shape[-2]
    width = outputs // 2 if pair else outputs
    out_PO = torch.empty(P, width, dtype=x_PI.dtype, device=x_PI.device)
    of_x, stride = (None, 0) if weight.zeros_EGO is None else sums_map(x_PI, TILE)
    launch(
        quantized_matmul,
        (processors(x_PI.device),),
        codes_map(weight, 32 if pair else 64),
        weight.scales_EGO,
        weight.zeros_EGO,
        bias_O,
        tensor_map(x_PI, 64, 64),
        of_x,
        tensor_map(out_PO, 64, 32 if pair else 64),
        None if routing is None else routing.tiles,
        None if routing is None else routing.totals,
        -(-width // (64 if pair else 128)),
        P,
        stride,
        inputs // 64,
        width,
        outputs,
        -(-inputs // weight.group),
        PAIR=pair,
        BITS=weight.bits,
        QUANTUM=weight.group,
        NEAR=8,
        STAGES=6,
        RECORD=RECORD,
        num_warps=4,
    )
    return out_PO


def experts(x_TD: torch.Tensor, routes: Routes, gate_up: PackedWeight, down: PackedWeight) -> torch.Tensor:
    """Rows are sorted before they are multiplied: gathering them as they are read was slower."""
    T, K = routes.experts_TK.shape
    routing = route(routes.experts_TK, gate_up.shape[0], TILE)
    hidden_PF = matmul(rows.permute(x_TD, routing, K), gate_up, None, routing, pair=True)
    return rows.combine(matmul(hidden_PF, down, None, routing), routing, routes.weights_TK, T, K)
