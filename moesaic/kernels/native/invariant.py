"""Learn with the very bits the engine computes: native kernels forward, library gradients back.

The native kernels give a token the same bits alone and in any batch, however its sequence was split into steps. They
know no gradients. Here each of them gets one, so that the trainer's log-probability of a token is to the bit what the
engine recorded when it sampled it. Gradients themselves are ordinary library products, and need no such promise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import cpu
from moesaic.kernels.biased_attention import attend_biased
from moesaic.kernels.exact_forward import exact_forward, exact_matmul, needs_grad
from moesaic.kernels.interface import AttentionCall, DeltaCall, Dispatched, LatentCall, Mask, Routes
from moesaic.kernels.latent_attention import attend_latent
from moesaic.kernels.layer_weights import ExpertWeights, RouteRules
from moesaic.kernels.native import NativeKernels, packed


class InvariantKernels:
    """What needs no gradient goes straight to the native kernels."""

    def __init__(self, native: NativeKernels) -> None:
        self.native, self.library = native, native.library
        self.embed, self.rotate, self.rms_norm = native.embed, native.rotate, native.rms_norm
        self.qk_norm_rope, self.run_layers = native.qk_norm_rope, native.run_layers
        self.run_retained_layers = native.run_retained_layers
        self.layer_norm, self.activate, self.run_encoder = native.layer_norm, native.activate, native.run_encoder
        self.dispatch, self.combine = native.dispatch, native.combine
        self.linear_cross_entropy, self.select_tokens = native.linear_cross_entropy, native.select_tokens
        self.index_rows = native.index_rows

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        return exact_matmul(self.native.linear, x_TI, weight_OI, bias_O)

    def attention(self, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
        def run(kernels: Any, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor) -> Tensor:
            # The native kernel takes packed heads only, and leaves others to the library.
            packed = q_THC.contiguous(), k_MNC.contiguous(), v_MNX.contiguous()
            out_THX: Tensor = kernels.attention(*packed, mask)
            return out_THX

        return self._exact(run, q_THC, k_MNC, v_MNX)

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        if call.bias is not None:  # the same blocks for the trainer as for the engine
            return attend_biased(q_THC, k_TNC, v_TNC, call)
        if call.cache is None and not call.layout.has_trees and all(map(packed, (q_THC, k_TNC, v_TNC))):
            return self.native.attend(q_THC, k_TNC, v_TNC, call)  # has a gradient of its own

        def run(kernels: Any, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, sinks_H: Tensor | None = None) -> Tensor:
            out_THC: Tensor = kernels.attend(q_THC, k_TNC, v_TNC, call._replace(sinks_H=sinks_H))
            return out_THC

        return self._exact(run, q_THC, k_TNC, v_TNC, *given(call.sinks_H))

    def gated(self, gate_up_TG: Tensor, activation: str) -> Tensor:
        if activation == "silu":  # has a gradient of its own
            return self.native.gated(gate_up_TG, activation)
        return self._exact(lambda kernels, gate_up_TG: kernels.gated(gate_up_TG, activation), gate_up_TG)

    def delta_rule(self, call: DeltaCall) -> Tensor:
        """Token by token forward; backward in chunks."""

        def run(kernels: Any, *inputs: Tensor) -> Tensor:
            given: dict[str, Any] = dict(zip(DeltaCall._fields, inputs))
            out_THV: Tensor = kernels.delta_rule(call._replace(**given))
            return out_THV

        return self._exact(run, *call[:6])

    def attend_latent(self, call: LatentCall) -> Tensor:
        return attend_latent(call, self.rms_norm, self.rotate, self.attention)

    def router_logits(self, x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
        return self.linear(x_TD.float(), weight_ED.float())

    def route(
        self, logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
    ) -> Routes:
        with torch.no_grad():
            routes = self.native.route(logits_TE, correction_E, rules, chosen_TK)
        if not needs_grad(logits_TE):
            return routes

        def run(kernels: Any, logits_TE: Tensor) -> Tensor:
            weights_TK: Tensor = kernels.route(logits_TE, correction_E, rules, routes.experts_TK).weights_TK
            return weights_TK

        return Routes(routes.experts_TK, self._exact(run, logits_TE))

    def compute_experts(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        """As `experts` does it, in which a row has one expert: experts of other ranks give the bits of those here."""
        expert_A = torch.arange(len(weights.gate_up_EGD)).repeat_interleave(sent.counts_E)
        return self.experts(sent.x_AD, Routes(expert_A[:, None], sent.weights_A1), weights)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        inputs = (x_TD, routes.weights_TK, weights.gate_up_EGD, weights.down_EDF)
        native = weights.activation == "silu" and x_TD.dtype == torch.float32  # what its way back is written for
        if native and weights.bias_EG is None and needs_grad(*inputs):
            out_TD: Tensor = _Experts.apply(self.native, x_TD, routes.experts_TK, *inputs[1:])
            return out_TD

        def run(kernels: Any, x_TD: Tensor, weights_TK: Tensor, *parts: Tensor) -> Tensor:
            own = ExpertWeights(parts[0], parts[1], weights.activation, weights.site, *parts[2:])
            out_TD: Tensor = kernels.experts(x_TD, Routes(routes.experts_TK, weights_TK), own)
            return out_TD

        return self._exact(run, *inputs, *given(weights.bias_EG))

    def _exact(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Forward by the native kernels; for the gradient by the library once more, whose gradient is known."""
        out: Tensor = exact_forward(partial(run, self.native), partial(run, cpu), *inputs)
        return out


def given(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return () if tensor is None else (tensor,)


class _Experts(torch.autograd.Function):
    """Only what the gradient needs is computed again: the products into the hidden vectors, not those out of them."""

    @staticmethod
    def forward(
        ctx: Any,
        native: NativeKernels,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
    ) -> Tensor:
        ctx.native = native
        ctx.save_for_backward(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF)
        return native.experts(x_TD, Routes(routes_TK, weights_TK), ExpertWeights(gate_up_EGD, down_EDF, "silu"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF = ctx.saved_tensors
        flat_A = routes_TK.reshape(-1)  # an assignment A is a token and one of its experts
        order_A = flat_A.argsort(stable=True)
        token_A = order_A // routes_TK.shape[1]
        counts = torch.bincount(flat_A, minlength=len(gate_up_EGD)).tolist()
        x_AD, d_y_AD = x_TD.index_select(0, token_A), grads[0].index_select(0, token_A)
        weight_A1 = weights_TK.reshape(-1).index_select(0, order_A).unsqueeze(1)

        gate_up_AG = x_AD.new_empty(len(order_A), gate_up_EGD.shape[1])
        d_weighed_AF = x_AD.new_empty(len(order_A), down_EDF.shape[2])
        runs = [(e, slice(end - count, end)) for e, (count, end) in enumerate(zip(counts, accumulate(counts))) if count]
        for expert, run in runs:
            torch.mm(x_AD[run], gate_up_EGD[expert].t(), out=gate_up_AG[run])
            torch.mm(d_y_AD[run], down_EDF[expert], out=d_weighed_AF[run])
        hidden_AF = ctx.native.gated(gate_up_AG, "silu")
        d_weights_A = (d_weighed_AF * hidden_AF).sum(1)
        d_gate_up_AG = ctx.native.gated_back(gate_up_AG, d_weighed_AF.mul_(weight_A1))
        weighed_AF = hidden_AF.mul_(weight_A1)

        trained = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]  # under an adapter they are frozen
        d_gate_up_EGD, d_down_EDF = (torch.zeros_like(w) if trained else None for w in (gate_up_EGD, down_EDF))
        d_x_AD = torch.empty_like(x_AD)
        for expert, run in runs:
            if d_gate_up_EGD is not None and d_down_EDF is not None:
                torch.mm(d_gate_up_AG[run].t(), x_AD[run], out=d_gate_up_EGD[expert])
                torch.mm(d_y_AD[run].t(), weighed_AF[run], out=d_down_EDF[expert])
            torch.mm(d_gate_up_AG[run], gate_up_EGD[expert], out=d_x_AD[run])
        d_x_TD = torch.zeros_like(x_TD).index_add_(0, token_A, d_x_AD)
        d_weights_TK = torch.empty_like(weights_TK).view(-1).index_copy_(0, order_A, d_weights_A).view_as(weights_TK)
        return None, d_x_TD, None, d_weights_TK, d_gate_up_EGD, d_down_EDF
