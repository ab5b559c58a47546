"""The feed-forward half of a layer: one dense gated network, or a mixture of experts with an optional shared one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moesaic.kernels.layer_weights import DenseWeights, ExpertWeights, MixtureWeights
from moesaic.kernels.wrapped import begin_experts, finished
from moesaic.model.config import Dense, Experts, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.linear import Linear
from moesaic.model.router import Router


def make_feed_forward(config: ModelConfig, ffn: Dense | Experts, number: int) -> DenseFeedForward | MixtureFeedForward:
    if isinstance(ffn, Dense):
        return DenseFeedForward(config, ffn)
    return MixtureFeedForward(config, ffn, number)


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
    """Rows on their way to experts, or their results; and what shared experts made of them."""

    x_TD: Tensor
    experts: Tensor | Callable[[], Tensor]
    shared_TD: Tensor | None


class MixtureFeedForward(nn.Module):
    site = ""

    def __init__(self, config: ModelConfig, experts: Experts, number: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.router = Router(config.hidden, experts, number)
        self.gate_up_EGD = nn.Parameter(torch.empty(experts.count, 2 * experts.hidden, config.hidden))
        self.down_EDF = nn.Parameter(torch.empty(experts.count, config.hidden, experts.hidden))
        self.shared = DenseFeedForward(config, Dense(experts.shared_hidden)) if experts.shared_hidden else None
        self.residual = Linear(config.hidden, 2, bias=True) if experts.residual else None

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.finish(self.begin(x_TD, context), context)

    def begin(self, x_TD: Tensor, context: ForwardContext) -> BegunMixture:
        """Rows go to their experts; what a token needs besides is computed while they travel, if experts are
        elsewhere."""
        routes = self.router(x_TD, context.routing, context.ops)
        begun = begin_experts(context.ops, x_TD, routes, self.expert_weights())
        return BegunMixture(x_TD, begun, None if self.shared is None else self.shared(x_TD, context))

    def finish(self, begun: BegunMixture, context: ForwardContext) -> Tensor:
        x_TD, experts, shared_TD = begun
        out_TD = finished(experts)
        if shared_TD is None:
            return out_TD
        if self.residual is None:
            return out_TD + shared_TD
        # DeepSpeed-MoE: the expert corrects the dense network, by a learned share per token.
        share_T2 = self.residual(x_TD, context.ops).softmax(-1)
        return shared_TD * share_T2[:, :1] + out_TD * share_T2[:, 1:]

    def expert_weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up_EGD, self.down_EDF, self.activation, self.site)

    def weights(self) -> MixtureWeights:
        router = self.router
        return MixtureWeights(
            router.weight,
            router.correction,
            router.shape,
            self.expert_weights(),
            self.shared.weights() if self.shared is not None else None,
            self.residual.weights() if self.residual is not None else None,
        )
