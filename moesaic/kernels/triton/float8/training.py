"""Matmuls in float8 to train with, on Hopper; `moesaic/kernels/float8.py` says what they mean.

model.ops = Float8Kernels(model.ops, HopperFloat8())
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.triton.experts import rows
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.experts.tuning import choose
from moesaic.kernels.triton.float8.rounding import Rounded, round_both_ways, round_sorted
from moesaic.kernels.triton.float8.swiglu import swiglu_backward
from moesaic.kernels.triton.graph_break import eager


class HopperFloat8:
    """Experts' widths must be multiples of 128, as `takes_experts` says; a matrix whose sides are no multiples of 16
    is multiplied by in the model's dtype."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        outputs, inputs = weight_OI.shape
        if x_TI.dim() != 2 or not len(x_TI) or outputs % 16 or inputs % 16:
            return F.linear(x_TI, weight_OI, bias_O)
        return eager_linear(x_TI, weight_OI, bias_O)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        _, hidden, width = weights.down_EDF.shape
        assert takes_experts(hidden, width, weights.activation) and weights.bias_EG is None
        if not len(x_TD):
            return x_TD * 1.0
        return eager_experts(x_TD, routes.experts_TK, routes.weights_TK, weights.gate_up_EGD, weights.down_EDF)


@eager
def eager_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    out_TO: Tensor = _Linear.apply(x_TI, weight_OI, bias_O)
    return out_TO


@eager
def eager_experts(x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    given = x_TD.contiguous(), routes_TK.contiguous(), weights_TK.float().contiguous()
    out_TD: Tensor = _Experts.apply(*given, gate_up_EGD, down_EDF)
    return out_TD


def takes_experts(hidden: int, width: int, activation: str) -> bool:
    return hidden % 128 == 0 and width % 128 == 0 and activation == "silu"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, weight_OI, bias_O):
        from moesaic.kernels.triton.float8.hopper import matmul as hopper

        both = round_both_ways(weight_OI[None])
        ctx.save_for_backward(x_TI, *both.turned)
        ctx.biased = bias_O is not None
        return hopper.matmul(round_sorted(x_TI), both.straight, bias_O)

    @staticmethod
    def backward(ctx, grad_TO):
        from moesaic.kernels.triton.float8.hopper import matmul as hopper

        (x_TI, *turned), grad_TO = ctx.saved_tensors, grad_TO.contiguous()
        grad_x = hopper.matmul(round_sorted(grad_TO), Rounded(*turned)) if ctx.needs_input_grad[0] else None
        grad_weight = grad_TO.T @ x_TI if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad_TO.sum(0) if ctx.biased else None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF):
        from moesaic.kernels.triton.float8.hopper import matmul as hopper

        (T, K), E = routes_TK.shape, gate_up_EGD.shape[0]
        gate_up, down = round_both_ways(gate_up_EGD), round_both_ways(down_EDF)
        routing = route(routes_TK, E, hopper.ALIGN)
        gate_up_PG, hidden = hopper.gate_up(round_sorted(x_TD, routing, K), gate_up.straight, routing, save=True)
        out_PD = hopper.matmul(hidden, down.straight, routing=routing)
        ctx.save_for_backward(x_TD, weights_TK, gate_up_PG, *gate_up.turned, *down.turned)
        ctx.routing, ctx.choice = routing, choose(x_TD, routes_TK, gate_up_EGD, training=True)
        return rows.combine(out_PD, routing, weights_TK, T, K)

    @staticmethod
    def backward(ctx, grad_TD):
        from moesaic.kernels.triton.experts.hopper import grouped
        from moesaic.kernels.triton.float8.hopper import matmul as hopper

        x_TD, weights_TK, gate_up_PG, *turned = ctx.saved_tensors
        routing, choice, (T, K), grad_TD = ctx.routing, ctx.choice, weights_TK.shape, grad_TD.contiguous()
        last_use = not torch._C._autograd._get_current_graph_task_keep_graph()  # the saved rows may be overwritten
        _, _, _, wants_gate_up, wants_down = ctx.needs_input_grad
        grad_x = grad_gate_up = grad_down = None
        hidden_PF = hopper.matmul(round_sorted(grad_TD, routing, K), Rounded(*turned[2:]), routing=routing)
        grad_PG, grad_weights, rounded_PG = swiglu_backward(hidden_PF, gate_up_PG, weights_TK, routing, last_use)
        if wants_down:
            gathered = choice.gather_grad
            grad = grad_TD if gathered else rows.permute(grad_TD, routing, K)
            grad_down = grouped.columns(grad, hidden_PF, routing, gathered, False, K, choice.group)
            del grad
        del hidden_PF
        if ctx.needs_input_grad[0]:
            grad_PD = hopper.matmul(rounded_PG, Rounded(*turned[:2]), routing=routing)
            grad_x = rows.combine(grad_PD, routing, None, T, K)
        if wants_gate_up:
            gathered = choice.gather_x_again
            x = x_TD if gathered else rows.permute(x_TD, routing, K)
            grad_gate_up = grouped.columns(grad_PG, x, routing, False, gathered, K, choice.group)
        return grad_x, None, grad_weights, grad_gate_up, grad_down
