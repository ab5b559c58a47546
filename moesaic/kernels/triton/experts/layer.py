"""The experts of a mixture-of-experts layer on a GPU: y = sum_k weight_k * down_e(silu(gate_e x) * up_e x), or another
gate of the two (`gate.py`).

Deterministic, and a token's bits do not depend on the rest of the batch. Kept for the backward pass: the inputs and the
rounded gate and up rows; hidden rows and gathered inputs are made again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.exact_forward import needs_grad
from moesaic.kernels.interface import Routes
from moesaic.kernels.triton.experts import decode, grouped, rows, streamed
from moesaic.kernels.triton.experts.gate import PLAIN, Gate
from moesaic.kernels.triton.experts.sort import Routing, route
from moesaic.kernels.triton.experts.tuning import Choice, choose
from moesaic.kernels.triton.experts.tuning import streamed as streamed_choice
from moesaic.kernels.triton.float8 import weight as float8
from moesaic.kernels.triton.float8.weight import Float8Weight
from moesaic.kernels.triton.quantized import matmul as quantized
from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight

Weight = Tensor | GpuQuantizedWeight | Float8Weight


def forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    routing: Routing,
    choice: Choice,
    save: bool,
    gate: Gate = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """(y, gate and up rows if `save`, without a bias)."""
    T, K = weights_TK.shape
    if choice.path == "hopper":
        from moesaic.kernels.triton.experts.hopper import grouped as hopper

        x = x_TD if choice.gather_x else rows.permute(x_TD, routing, K)
        choices = K if choice.gather_x else 0
        if gate.is_plain:
            gate_up_PG, hidden_PF = hopper.gate_up(x, gate_up_EGD, routing, save, choices, choice.group_forward)
        else:
            gate_up_PG = hopper.rows(x, gate_up_EGD, routing, False, choices, choice.group_forward)
            hidden_PF = rows.swiglu(gate_up_PG, gate, routing)
        del x
        out_PD = hopper.rows(hidden_PF, down_EDF, routing, False, 0, choice.group_forward)
    elif choice.path == "streamed":
        assert not save
        gate_up_PG = None
        hidden_PF = streamed.rows(x_TD, gate_up_EGD, routing, choice.up_tile, choices=K, pair=gate)
        out_PD = streamed.rows(hidden_PF, down_EDF, routing, choice.down_tile)
    else:
        gate_up_PG = grouped.rows(rows.permute(x_TD, routing, K), gate_up_EGD, routing, False, choice.block)
        hidden_PF = rows.swiglu(gate_up_PG, gate, routing)
        out_PD = grouped.rows(hidden_PF, down_EDF, routing, False, choice.block)
    return rows.combine(out_PD, routing, weights_TK, T, K), gate_up_PG if save else None


Wanted = tuple[bool, bool, bool, bool]  # whether the gradients of x, gate_up, down and the bias are
Gradients = tuple[Tensor | None, ...]  # of x, routing weights, gate_up, down and the bias


@dataclass(frozen=True)
class Saved:
    """What a forward keeps for its backward."""

    tensors: tuple[Tensor, ...]  # x, routing weights, gate_up, down, gate and up rows
    routing: Routing
    choice: Choice
    gate: Gate = PLAIN


def backward_portable(grad_TD: Tensor, saved: Saved, in_place: bool, wanted: Wanted) -> Gradients:
    """In the plainest way."""
    grad_x_TD = grad_gate_up_EGD = grad_down_EDF = grad_bias_EG = None
    x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG = saved.tensors
    routing, choice, (T, K) = saved.routing, saved.choice, weights_TK.shape
    grad_PD = rows.permute(grad_TD, routing, K)
    hidden_PF = grouped.rows(grad_PD, down_EDF, routing, True, choice.block)
    grad_PG, grad_weights_TK = rows.swiglu_backward(hidden_PF, gate_up_PG, weights_TK, routing, in_place, saved.gate)
    if wanted[3]:
        grad_bias_EG = rows.sum_segments(grad_PG, routing)
    if wanted[2]:
        grad_down_EDF = grouped.columns(grad_PD, hidden_PF, routing, choice.block)
    del grad_PD, hidden_PF
    if wanted[0]:
        grad_x_TD = rows.combine(grouped.rows(grad_PG, gate_up_EGD, routing, True, choice.block), routing, None, T, K)
    if wanted[1]:
        grad_gate_up_EGD = grouped.columns(grad_PG, rows.permute(x_TD, routing, K), routing, choice.block)
    return grad_x_TD, grad_weights_TK, grad_gate_up_EGD, grad_down_EDF, grad_bias_EG


def backward_hopper(grad_TD: Tensor, saved: Saved, in_place: bool, wanted: Wanted) -> Gradients:
    """The same, with gathers and SwiGLU inside the matmuls. The largest gradient is made last, when least is held."""
    from moesaic.kernels.triton.experts.hopper import grouped as hopper

    grad_x_TD = grad_gate_up_EGD = grad_down_EDF = grad_bias_EG = None
    x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG = saved.tensors
    routing, choice, (T, K) = saved.routing, saved.choice, weights_TK.shape
    grad = grad_TD if choice.gather_grad else rows.permute(grad_TD, routing, K)
    if choice.chain and saved.gate.is_plain:
        grad_PG, hidden_PF, parts_XP = hopper.grad_gate_up(
            grad, down_EDF, gate_up_PG, weights_TK, routing, in_place, choice.gather_grad, choice.group
        )
        grad_weights_TK = rows.sum_parts(parts_XP, routing, weights_TK)
    else:
        hidden_PF = hopper.rows(grad, down_EDF, routing, True, K if choice.gather_grad else 0, choice.group)
        grad_PG, grad_weights_TK = rows.swiglu_backward(
            hidden_PF, gate_up_PG, weights_TK, routing, in_place, saved.gate
        )
    if wanted[3]:
        grad_bias_EG = rows.sum_segments(grad_PG, routing)
    if wanted[2]:
        grad_down_EDF = hopper.columns(grad, hidden_PF, routing, choice.gather_grad, False, K, choice.group)
    del grad, hidden_PF
    if wanted[0]:
        grad_x_TD = rows.combine(hopper.rows(grad_PG, gate_up_EGD, routing, True, 0, choice.group), routing, None, T, K)
    if wanted[1]:
        x = x_TD if choice.gather_x_again else rows.permute(x_TD, routing, K)
        grad_gate_up_EGD = hopper.columns(grad_PG, x, routing, False, choice.gather_x_again, K, choice.group)
    return grad_x_TD, grad_weights_TK, grad_gate_up_EGD, grad_down_EDF, grad_bias_EG


BACKWARD = {"hopper": backward_hopper, "portable": backward_portable}


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF, bias_EG, choice, clamped):
        gate = Gate(clamped, bias_EG)
        routing = route(routes_TK, gate_up_EGD.shape[0], choice.align)
        y_TD, gate_up_PG = forward(x_TD, weights_TK, gate_up_EGD, down_EDF, routing, choice, True, gate)
        ctx.save_for_backward(x_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_PG, bias_EG)
        ctx.routing, ctx.choice, ctx.clamped = routing, choice, clamped
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD):
        last_use = not torch._C._autograd._get_current_graph_task_keep_graph()  # the saved rows may be overwritten
        wanted = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:6])
        *tensors, bias_EG = ctx.saved_tensors
        saved = Saved(tuple(tensors), ctx.routing, ctx.choice, Gate(ctx.clamped, bias_EG))
        grads = BACKWARD[ctx.choice.path](grad_TD.contiguous(), saved, last_use, wanted)
        grad_x, grad_weights, *grad_parameters = grads
        return grad_x, None, grad_weights, *grad_parameters, None, None


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense().to(dtype)


def experts(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    choice: Choice | None = None,
    gate: Gate = PLAIN,
) -> Tensor:
    """The weighted sum of each token's routed experts; differentiable in everything but the routes, and in nothing
    where the experts are quantized."""
    if isinstance(gate_up_EGD, GpuQuantizedWeight) and isinstance(down_EDF, GpuQuantizedWeight) and gate.is_plain:
        return quantized.experts(x_TD, Routes(routes_TK, weights_TK), gate_up_EGD, down_EDF)
    if isinstance(gate_up_EGD, Float8Weight) and isinstance(down_EDF, Float8Weight) and gate.is_plain:
        return float8.experts(x_TD, Routes(routes_TK, weights_TK), gate_up_EGD, down_EDF)
    gate_up_EGD, down_EDF = dense(gate_up_EGD, x_TD.dtype), dense(down_EDF, x_TD.dtype)
    training = needs_grad(x_TD, weights_TK, gate_up_EGD, down_EDF, gate.bias_EG)
    x_TD, routes_TK, weights_TK = x_TD.contiguous(), routes_TK.contiguous(), weights_TK.contiguous()
    gate_up_EGD, down_EDF = gate_up_EGD.contiguous(), down_EDF.contiguous()
    if choice is None:
        choice = choose(x_TD, routes_TK, gate_up_EGD, training)
    if x_TD.shape[0] == 0:
        return x_TD * 1.0
    if training:
        inputs = (x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF, gate.bias_EG)
        return Experts.apply(*inputs, choice, gate.clamped)
    if choice.path == "decode":
        tiles = (choice.up_tile, choice.down_tile)
        return decode.decode(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF, *tiles, gate)
    routing = route(routes_TK, gate_up_EGD.shape[0], choice.align)
    return forward(x_TD, weights_TK, gate_up_EGD, down_EDF, routing, choice, False, gate)[0]


def assignment_rows(x_ND: Tensor, experts_N: Tensor, gate_up_EGD: Weight, down_EDF: Weight) -> Tensor:
    """What `experts` makes of each assignment before it weighs and adds them (`rows.combine_tokens`), to the same bits:
    for batches whose experts are not all there at once."""
    routes_N1 = experts_N.unsqueeze(1)
    ones_N1 = torch.ones(routes_N1.shape, dtype=torch.float32, device=x_ND.device)
    if isinstance(gate_up_EGD, GpuQuantizedWeight) and isinstance(down_EDF, GpuQuantizedWeight):
        return quantized.sorted_experts(x_ND, Routes(routes_N1, ones_N1), gate_up_EGD, down_EDF)
    gate_up_EGD, down_EDF = dense(gate_up_EGD, x_ND.dtype), dense(down_EDF, x_ND.dtype)
    choice = choose(x_ND, routes_N1, gate_up_EGD, training=False)
    if choice.path == "decode":  # whose tiles are for several experts of a token
        F = gate_up_EGD.shape[1] // 2
        choice = streamed_choice(x_ND, (x_ND.shape[1], F, gate_up_EGD.shape[0], 1))
    return experts(x_ND, routes_N1, ones_N1, gate_up_EGD, down_EDF, choice)
