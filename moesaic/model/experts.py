"""The feed-forward half of a layer: one dense gated network, or a mixture of experts with an optional shared one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import DenseWeights, ExpertWeights, MixtureWeights
from moesaic.kernels.wrapped import begin_experts, finished
from moesaic.model.config import Dense, Experts, ModelConfig, Reading
from moesaic.model.context import ForwardContext
from moesaic.model.knowledge import KnowledgeReading
from moesaic.model.linear import Linear
from moesaic.model.router import Router


def make_feed_forward(
    config: ModelConfig, ffn: Dense | Experts | Reading, number: int
) -> DenseFeedForward | MixtureFeedForward | KnowledgeReading:
    if isinstance(ffn, Dense):
        assert ffn.gated, "only encoders have feed-forward layers without a gate"
        return DenseFeedForward(config, ffn)
    return KnowledgeReading(config, ffn) if isinstance(ffn, Reading) else MixtureFeedForward(config, ffn, number)


class DenseFeedForward(nn.Module):
    def __init__(self, config: ModelConfig, dense: Dense) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_up = Linear(config.hidden, 2 * dense.hidden, dense.bias)
        self.down = Linear(dense.hidden, config.hidden, dense.bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.down(context.ops.gated(self.gate_up(x_TD, context.ops), self.activation), context.ops)

    def weights(self) -> DenseWeights:
        return DenseWeights(self.gate_up.weights(), self.down.weights(), self.activation)


class BegunMixture(NamedTuple):
    """Rows on their way to experts, or their results; and what shared experts and biases add to them."""

    x_TD: Tensor
    experts: Tensor | Callable[[], Tensor]
    beside_TD: Tensor | None


class MixtureFeedForward(nn.Module):
    site = ""

    def __init__(self, config: ModelConfig, experts: Experts, number: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.router = Router(config.hidden, experts, number)
        self.gate_up_EGD = nn.Parameter(torch.empty(experts.count, 2 * experts.hidden, config.hidden))
        self.down_EDF = nn.Parameter(torch.empty(experts.count, config.hidden, experts.hidden))
        self.bias_EG = nn.Parameter(torch.empty(experts.count, 2 * experts.hidden)) if experts.bias else None
        self.down_bias_ED = nn.Parameter(torch.empty(experts.count, config.hidden)) if experts.bias else None
        self.shared = DenseFeedForward(config, Dense(experts.shared_hidden)) if experts.shared_hidden else None
        self.residual = Linear(config.hidden, 2, bias=True) if experts.residual else None
        self.shared_gate = Linear(config.hidden, 1) if experts.shared_gate else None

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.finish(self.begin(x_TD, context), context)

    def begin(self, x_TD: Tensor, context: ForwardContext) -> BegunMixture:
        """Rows go to their experts; what a token needs besides is computed while they travel, if experts are
        elsewhere."""
        routes = self.router(x_TD, context.routing, context.ops)
        sent_TD, sent = x_TD, routes
        if self.router.shape.scales_input:  # then all that experts give counts alike
            sent_TD = x_TD * routes.weights_TK.to(x_TD.dtype)
            sent = routes._replace(weights_TK=torch.ones_like(routes.weights_TK))
        begun = begin_experts(context.ops, sent_TD, sent, self.expert_weights())
        beside_TD = None if self.shared is None else self.shared(x_TD, context)
        if beside_TD is not None and self.shared_gate is not None:
            # A sigmoid; as a softmax beside zero a row has its own bits in any batch.
            gate_T2 = F.pad(self.shared_gate(x_TD, context.ops), (0, 1)).softmax(-1)
            beside_TD = beside_TD * gate_T2[:, :1]
        if self.down_bias_ED is not None:
            biases_TD = weighed_biases(routes, self.down_bias_ED)
            beside_TD = biases_TD if beside_TD is None else beside_TD + biases_TD
        return BegunMixture(x_TD, begun, beside_TD)

    def finish(self, begun: BegunMixture, context: ForwardContext) -> Tensor:
        x_TD, experts, beside_TD = begun
        out_TD = finished(experts)
        if beside_TD is None:
            return out_TD
        if self.residual is None:
            return out_TD + beside_TD
        # DeepSpeed-MoE: the expert corrects the dense network, by a learned share per token.
        share_T2 = self.residual(x_TD, context.ops).softmax(-1)
        return beside_TD * share_T2[:, :1] + out_TD * share_T2[:, 1:]

    def expert_weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_EGD, self.down_EDF, self.activation, self.site, self.bias_EG)

    def weights(self) -> MixtureWeights:
        router = self.router
        return MixtureWeights(
            router.weight,
            router.correction,
            router.shape,
            self.expert_weights(),
            self.shared.weights() if self.shared is not None else None,
            self.residual.weights() if self.residual is not None else None,
            self.shared_gate.weights() if self.shared_gate is not None else None,
            router.bias,
            self.down_bias_ED,
            self.beyond(),
        )

    def beyond(self) -> str | None:
        """What of it kernels of several operations do not know."""
        return "experts whose inputs are scaled" if self.router.shape.scales_input else None


def weighed_biases(routes: Routes, bias_ED: Tensor) -> Tensor:
    """What the biases of a token's experts add: the sum is of single products, so it is the same in any batch."""
    weights_TK = routes.weights_TK.to(bias_ED.dtype)
    terms = [
        weights_T1 * bias_ED.index_select(0, chosen_T)
        for chosen_T, weights_T1 in zip(routes.experts_TK.unbind(1), weights_TK.split(1, dim=1), strict=True)
    ]
    return sum(terms[1:], terms[0])
