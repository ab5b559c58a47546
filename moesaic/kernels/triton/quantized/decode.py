"""Decode with weights quantized to 4 or 8 bits, a few tokens at a time: experts in two launches, linear maps in one.

How the kernels do it is explained in `decode_kernels.py`; here is which matmuls they take.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton

from moesaic.kernels.interface import Routes
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl
from moesaic.kernels.triton.quantized.decode_kernels import hidden_kernel, output_kernel, rows_kernel
from moesaic.kernels.triton.quantized.packed_weight import PackedWeight

BLOCK = 128  # inputs: of 4 bits those in 64 bytes of a row, half of them in their low bits, the next in their high bits
PAIRS = 2 * BLOCK  # blocks are taken two at a time
REGISTERS = 64  # of a thread, for codes that are asked for together
MAX_TOP_K = 8
TOKENS = 4  # of a linear map, by one program
AGAIN = 10240  # columns that may be unpacked more than once, for more tokens; measured on an H200


def runs_here(x_TI: torch.Tensor, *weights: PackedWeight) -> bool:
    known = all(weight.half_width == 64 and weight.inputs % BLOCK == 0 for weight in weights)
    return known and x_TI.dtype == torch.bfloat16 and supports_pdl(x_TI.device)


def common(weight: PackedWeight, rows: int, device: torch.device) -> dict:
    """MOST is how many pairs of blocks are asked for together, of eight times `rows` rows of weights by each warp."""
    in_flight = REGISTERS // (2 * weight.bits * rows)
    return {"GROUP": weight.group, "BITS": weight.bits, "IN_FLIGHT": in_flight, "PDL": supports_pdl(device)}


def packed_tensors(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As every kernel here takes them: codes, scales, zero points."""
    return weight.codes_EOB.view(torch.int32), weight.scales_EGO, weight.zeros_EGO


def takes_rows(x_TI: torch.Tensor, weight: PackedWeight) -> bool:
    times, outputs = triton.cdiv(len(x_TI), TOKENS), weight.codes_EOB.shape[1]
    return (times == 1 or times * outputs <= AGAIN) and outputs % 8 == 0 and runs_here(x_TI, weight)


def linear(x_TI: torch.Tensor, weight: PackedWeight, bias_O: torch.Tensor | None, out_TO: torch.Tensor) -> None:
    T, outputs = out_TO.shape
    launch_pdl(
        rows_kernel,
        (outputs // 8, triton.cdiv(T, TOKENS)),
        x_TI.view(torch.int64),
        *packed_tensors(weight),
        bias_O,
        out_TO,
        T,
        outputs,
        INPUTS=weight.inputs,
        TOKENS=TOKENS,
        num_warps=1,
        **common(weight, 1, x_TI.device),
    )


def max_assignments(inputs: int) -> int:
    """Up to which it is ahead of sorting them by expert, on an H200."""
    return 128 if inputs <= 2048 else 64


def takes_experts(x_TD: torch.Tensor, choices: int, gate_up: PackedWeight, down: PackedWeight) -> bool:
    return choices <= MAX_TOP_K and x_TD.shape[1] % PAIRS == 0 and runs_here(x_TD, gate_up, down)


def warps_to_share(inputs: int, in_flight: int) -> int:
    """How many of four warps share a row's inputs: as many as may be, if each has a few pairs of blocks."""
    return next(
        (warps for warps in (4, 2) if inputs % (PAIRS * warps) == 0 and inputs // PAIRS // warps > in_flight // 2), 1
    )


def experts(x_TD: torch.Tensor, routes: Routes, gate_up: PackedWeight, down: PackedWeight) -> torch.Tensor:
    (T, D), K, F = x_TD.shape, routes.experts_TK.shape[1], down.inputs
    hidden_NF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    facts = common(gate_up, 2, x_TD.device)
    share = warps_to_share(D, facts["IN_FLIGHT"])
    launch_pdl(
        hidden_kernel,
        (T * K, F // (32 // share)),
        x_TD.view(torch.int64),
        routes.experts_TK,
        *packed_tensors(gate_up),
        hidden_NF,
        F,
        D=D,
        K=K,
        SPLIT=share,
        num_warps=4,
        maxnreg=168,
        **facts,
    )
    slots = triton.next_power_of_2(K)
    launch_pdl(
        output_kernel,
        (T, D // 8),
        hidden_NF.view(torch.int64),
        *routes,
        *packed_tensors(down),
        out_TD,
        D,
        F=F,
        K=K,
        WARPS=slots,
        num_warps=slots,
        **common(down, 1, x_TD.device),
    )
    return out_TD
