"""Matmuls with weights quantized to 4 or 8 bits: linear maps, and experts with or without sorting tokens by expert.

What `decode.py` and, of many rows, `hopper/` take is faster there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import Any

import torch
import triton

from moesaic.kernels.interface import Routes
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl
from moesaic.kernels.triton.experts import rows
from moesaic.kernels.triton.experts.sort import RECORD, Routing, route
from moesaic.kernels.triton.quantized import decode
from moesaic.kernels.triton.quantized.hopper import matmul as hopper
from moesaic.kernels.triton.quantized.matmul_kernels import rows_kernel
from moesaic.kernels.triton.quantized.packed_weight import PackedWeight
from moesaic.kernels.triton.quantized.unsorted_kernels import hidden_kernel, output_kernel

MAX_TOP_K = 16  # experts of a token
MIN_TILE, MAX_TILE = 16, 128  # rows of a tile
# Rows of weights from which on tensor cores take inputs in their order. With fewer, the compiler lets each matmul have
# every other pair of inputs, and where a sum is not exact its last bit may differ from that in a larger batch: of 4
# bits one in 69,000.
MMA_ROWS = 64
MANY_ROWS = 256  # of a linear map, from which on `hopper/` is ahead on an H200
MANY_TOKENS = 24  # of an expert, on average, from which on it is
MANY_PROGRAMS = 128  # about as many as a GPU has multiprocessors


def common(weight: PackedWeight, dtype: torch.dtype, device: torch.device) -> dict:
    return {
        "WIDTH": weight.codes_EOB.shape[2],
        "GROUP": weight.group,
        "BITS": weight.bits,
        "HALF": weight.half_width,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "PACKED": dtype == torch.bfloat16 and device.type == "cuda",
        "PDL": supports_pdl(device),
    }


def matmul(
    x_PI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None, routing: Routing | None = None
) -> torch.Tensor:
    P, inputs = x_PI.shape
    outputs = weight.codes_EOB.shape[1]
    out_PO = torch.empty(P, outputs, dtype=x_PI.dtype, device=x_PI.device)
    if routing is None and decode.takes_rows(x_PI, weight):
        decode.linear(x_PI, weight, bias_O, out_PO)
        return out_PO
    if routing is None and P >= MANY_ROWS and hopper.takes(x_PI, weight):
        return hopper.matmul(x_PI, weight, bias_O)
    if routing is None:
        BM = min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(P)))
        count = triton.cdiv(P, BM)
    else:
        BM, count = routing.align, routing.tiles.shape[0]
    BN, stages, warps = tile_for(x_PI.dtype == torch.float32, BM, count * triton.cdiv(outputs, 2 * MMA_ROWS))
    launch_pdl(
        rows_kernel,
        (count, triton.cdiv(outputs, BN)),
        x_PI,
        weight.codes_EOB,
        weight.scales_EGO,
        weight.zeros_EGO,
        bias_O,
        out_PO,
        None if routing is None else routing.tiles,
        None if routing is None else routing.totals,
        P,
        inputs,
        outputs,
        BM=BM,
        BN=BN,
        RECORD=RECORD,
        STAGES=stages,
        num_warps=warps,
        **common(weight, x_PI.dtype, x_PI.device),
    )
    return out_PO


def tile_for(wide: bool, rows: int, programs: int) -> tuple[int, int, int]:
    """Columns, stages and warps: measured on an H200 for bf16. Twice the columns for twice the warps, where there are
    rows and programs enough: inputs are then read half as often (5 to 12 % at 4,096 and 16,384 tokens)."""
    if wide:
        return (32, 2, 4)
    return (2 * MMA_ROWS, 3, 8) if rows == MAX_TILE and programs >= MANY_PROGRAMS else (MMA_ROWS, 3, 4)


def tile_rows(mean: int) -> int:
    """Rows of a tile, for so many tokens of an expert: most experts have one tile, so that what is in it is unpacked
    once. Of 64 tokens, half of the experts have two of 64 rows; one of 128, half of it empty, takes 15 % longer."""
    wanted = triton.next_power_of_2(3 * mean // 2)
    return min(wanted, 64 if mean <= 96 else MAX_TILE) if wanted > MIN_TILE else MIN_TILE


def linear(x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    return matmul(x_TI.contiguous(), weight, bias_O)


def experts(x_TD: torch.Tensor, routes: Routes, gate_up: PackedWeight, down: PackedWeight) -> torch.Tensor:
    """The weighted sum of each token's routed experts."""
    x_TD, routes = x_TD.contiguous(), Routes(*(part_TK.contiguous() for part_TK in routes))
    T, K = routes.experts_TK.shape
    if not T:
        return x_TD * 1.0
    most = decode.max_assignments(x_TD.shape[1])
    if T * K <= min(most, gate_up.shape[0]) and decode.takes_experts(x_TD, K, gate_up, down):
        return decode.experts(x_TD, routes, gate_up, down)
    if K <= MAX_TOP_K and (T == 1 or T * K <= min(64, gate_up.shape[0] // 2)):
        return unsorted_experts(x_TD, routes, gate_up, down)
    return sorted_experts(x_TD, routes, gate_up, down)


def sorted_experts(x_TD: torch.Tensor, routes: Routes, gate_up: PackedWeight, down: PackedWeight) -> torch.Tensor:
    (T, K), E = routes.experts_TK.shape, gate_up.shape[0]
    if T * K >= MANY_TOKENS * E and hopper.takes(x_TD, gate_up, down):
        return hopper.experts(x_TD, routes, gate_up, down)
    routing = route(routes.experts_TK, E, tile_rows(T * K // E))
    hidden_PF = rows.swiglu(matmul(rows.permute(x_TD, routing, K), gate_up, None, routing))
    return rows.combine(matmul(hidden_PF, down, None, routing), routing, routes.weights_TK, T, K)


def unsorted_experts(x_TD: torch.Tensor, routes: Routes, gate_up: PackedWeight, down: PackedWeight) -> torch.Tensor:
    (T, D), K, F = x_TD.shape, routes.experts_TK.shape[1], down.inputs
    slots = triton.next_power_of_2(K)
    hidden_NF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    decoding: dict[str, Any] = {"K": K, "LANES": MAX_TOP_K, "STAGES": 3, "num_warps": 4}
    BN = MMA_ROWS // 2
    launch_pdl(
        hidden_kernel,
        (T * K, triton.cdiv(F, BN)),
        x_TD,
        routes.experts_TK,
        gate_up.codes_EOB,
        gate_up.scales_EGO,
        gate_up.zeros_EGO,
        hidden_NF,
        D,
        F,
        BN=BN,
        **decoding,
        **common(gate_up, x_TD.dtype, x_TD.device),
    )
    BN = MMA_ROWS // slots
    launch_pdl(
        output_kernel,
        (T, triton.cdiv(D, BN)),
        hidden_NF,
        *routes,
        down.codes_EOB,
        down.scales_EGO,
        down.zeros_EGO,
        out_TD,
        D,
        F,
        SLOTS=slots,
        BN=BN,
        **decoding,
        **common(down, x_TD.dtype, x_TD.device),
    )
    return out_TD
