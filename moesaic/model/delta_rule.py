"""What stands in place of attention in most layers of Qwen3-Next and its kin: a gated delta rule, whose cache is one
state for a sequence and not something for every token (`kernels/delta_rule.py` is the operation)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.kernels.interface import DeltaCall
from moesaic.model.config import DeltaRule, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.linear import Linear, Norm


class GatedDeltaRule(nn.Module):
    def __init__(self, config: ModelConfig, shape: DeltaRule, number: int) -> None:
        super().__init__()
        self.shape, self.number = shape, number
        self.keys, self.values = shape.key_heads * shape.key_size, shape.heads * shape.value_size
        self.qkvz = Linear(
            config.hidden, 2 * self.keys + 2 * self.values
        )  # queries, keys, values, gates of what is read
        self.strength_decay = Linear(config.hidden, 2 * shape.heads)
        self.taps_XW = nn.Parameter(torch.empty(2 * self.keys + self.values, shape.width))
        self.log_rate = nn.Parameter(torch.empty(shape.heads))
        self.shift = nn.Parameter(torch.empty(shape.heads))
        self.norm = Norm(shape.value_size, config.norm_eps)
        self.out = Linear(self.values, config.hidden)

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = self.shape
        state = (shape.heads, shape.key_size, shape.value_size)
        return {"state": state, "before": (shape.width - 1, 2 * self.keys + self.values)}

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        ops, layout, shape = context.ops, context.layout, self.shape
        states = context.layer_states(self.number)
        assert not layout.has_trees, "a state has one past"
        assert states is not None or not layout.is_cached, "whose sequences go on"
        qkv_TX, z_TX = self.qkvz(x_TD, ops).split([2 * self.keys + self.values, self.values], dim=1)
        strength_TH, decay_TH = self.strength_decay(x_TD, ops).split(shape.heads, dim=1)
        sizes = shape.key_heads, shape.key_size, shape.value_size
        gates = strength_TH, decay_TH, self.taps_XW, self.log_rate, self.shift
        read_THV = ops.delta_rule(DeltaCall(qkv_TX, *gates, *sizes, layout, states))
        normed_TX = self.norm(read_THV, ops).flatten(1)
        return self.out(ops.gated(torch.cat([z_TX, normed_TX], dim=1), "silu"), ops)
