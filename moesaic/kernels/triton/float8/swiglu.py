"""SwiGLU backwards where the gradients of gate and up are wanted twice: in bfloat16 for those of weights, and rounded
to float8 for those of inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

from moesaic.kernels.float8 import BLOCK
from moesaic.kernels.triton.experts.sort import RECORD, Routing
from moesaic.kernels.triton.float8.rounding import Rounded, row_stride
from moesaic.kernels.triton.launch import launch


@triton.jit
def round_groups(x, numbers_at, scales_at, kept_G, kept):
    """The operations of `round_kernel`, to its bits."""
    x = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12)
    tl.store(numbers_at, (x / scale[:, None]).to(tl.float8e4nv), mask=kept)
    tl.store(scales_at, scale, mask=kept_G)


@triton.jit
def swiglu_backward_kernel(
    grad_hidden_PF,
    gate_up_PG,
    weights_N,
    sources_P,
    tiles,
    totals,
    grad_gate_up_PG,
    grad_weights_N,
    numbers_PG,
    scales_GP,
    F,
    STRIDE,
    ALIGN: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
):
    """`swiglu_backward_rows` of `experts/rows.py`, which this follows operation by operation, and its rounding."""
    row = tl.program_id(0)
    tile = row // ALIGN
    if tile < tl.load(totals):
        record = tiles + tile * RECORD
        valid = row - tl.load(record + 3) < tl.load(record + 4)
        source = tl.where(valid, tl.load(sources_P + row), 0)
        weight = tl.where(valid, tl.load(weights_N + source), 0.0)
        width = tl.where(valid, F, 0)
        wide = row.to(tl.int64)
        groups = F // BLOCK
        kind = grad_gate_up_PG.dtype.element_ty
        dot = tl.zeros([GROUPS], tl.float32)
        for base in range(0, groups, GROUPS):
            group = base + tl.arange(0, GROUPS)
            column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            kept, inside, known = column < width, column < F, group < groups
            gate_at = wide * 2 * F + column
            gate = tl.load(gate_up_PG + gate_at, mask=kept, other=0.0).to(tl.float32)
            up = tl.load(gate_up_PG + gate_at + F, mask=kept, other=0.0).to(tl.float32)
            grad = tl.load(grad_hidden_PF + wide * F + column, mask=kept, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            hidden = gate / (1.0 + tl.exp(-gate)) * up
            dot += tl.sum(grad * hidden, 1)
            grad = grad * weight
            grad_gate = (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(kind)
            grad_up = (grad * silu).to(kind)
            tl.store(grad_gate_up_PG + gate_at, grad_gate, mask=inside)
            tl.store(grad_gate_up_PG + gate_at + F, grad_up, mask=inside)
            tl.store(grad_hidden_PF + wide * F + column, (weight * hidden).to(kind), mask=inside)
            scales_at = scales_GP + group.to(tl.int64) * STRIDE + row
            round_groups(grad_gate, numbers_PG + gate_at, scales_at, known, inside)
            round_groups(grad_up, numbers_PG + gate_at + F, scales_at + groups.to(tl.int64) * STRIDE, known, inside)
        if valid:
            tl.store(grad_weights_N + source, tl.sum(dot, 0))


def swiglu_backward(
    grad_hidden_PF: torch.Tensor, gate_up_PG: torch.Tensor, weights_TK: torch.Tensor, routing: Routing, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor, Rounded]:
    """(gradients of gate and up, of the routing weights, the former's float8 numbers and scales); `grad_hidden_PF`
    becomes the weighted hidden rows."""
    P, F = grad_hidden_PF.shape
    assert F % BLOCK == 0
    grad_gate_up_PG = gate_up_PG if in_place else torch.empty_like(gate_up_PG)
    grad_weights_TK = torch.empty_like(weights_TK)
    stride = row_stride(P)
    numbers_PG = torch.empty(P, 2 * F, dtype=torch.float8_e4m3fn, device=gate_up_PG.device)
    scales_GP = torch.empty(2 * F // BLOCK, stride, dtype=torch.float32, device=gate_up_PG.device)
    launch(
        swiglu_backward_kernel,
        (P,),
        grad_hidden_PF,
        gate_up_PG,
        weights_TK,
        routing.sources_P,
        routing.tiles,
        routing.totals,
        grad_gate_up_PG,
        grad_weights_TK,
        numbers_PG,
        scales_GP,
        F,
        stride,
        ALIGN=routing.align,
        GROUPS=min(8, triton.next_power_of_2(F // BLOCK)),
        BLOCK=BLOCK,
        RECORD=RECORD,
        num_warps=4,
    )
    return grad_gate_up_PG, grad_weights_TK, Rounded(numbers_PG, scales_GP)
