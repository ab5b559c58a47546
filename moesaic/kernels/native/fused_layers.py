"""One layer, or all layers of a short step, as one native call: between small operations Python takes longer than they
do, and finds every cache full of weights. The bits are those of the same operations one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.interface import Batch, KVCache, LayerStack, RopeAngles
from moesaic.kernels.layer_weights import GroupedQueryWeights, LayerWeights, LinearWeights, MixtureWeights

MAX_TOKENS = 64  # of one layer: above this the operations are long, and nothing is gained
MAX_STACK_TOKENS = 16  # of several: a longer step takes so long that somebody more urgent may come between its layers

SIZES = (
    "D", "H", "N", "C", "F", "E", "K", "G", "groups", "top_groups", "window", "interleaved", "softmax", "normalize",
)  # fmt: skip
FACTORS = ("eps", "attention_scale", "route_scale")
WEIGHTS = (
    "attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "ffn_norm", "gate_up", "gate_up_bias",
    "down", "down_bias", "router", "correction", "experts_gate_up", "experts_down",
)  # fmt: skip
NONE = LinearWeights(None)


def block_fields(pointers: Sequence[str]) -> list[tuple[str, Any]]:
    """A layer as native code reads it. Addresses are numbers, so that a model that holds them can be copied."""
    return [
        *((name, ctypes.c_size_t) for name in pointers),
        *((name, ctypes.c_long) for name in SIZES),
        *((name, ctypes.c_float) for name in FACTORS),
    ]


class Block(ctypes.Structure):
    _fields_ = block_fields(WEIGHTS)


class Parts:
    """A layer's weights by the names that native code has for them, None where it has none, and its numbers."""

    def __init__(self, layer: LayerWeights) -> None:
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(attention, GroupedQueryWeights)
        mixture = ffn if isinstance(ffn, MixtureWeights) else None
        dense = ffn.shared if isinstance(ffn, MixtureWeights) else ffn
        gate_up, down = (NONE, NONE) if dense is None else (dense.gate_up, dense.down)
        self.weights: dict[str, Any] = {
            "attention_norm": layer.attention_norm.weight,
            "qkv": attention.qkv.weight,
            "qkv_bias": attention.qkv.bias,
            "q_norm": attention.q_norm.weight if attention.q_norm is not None else None,
            "k_norm": attention.k_norm.weight if attention.k_norm is not None else None,
            "out": attention.out.weight,
            "out_bias": attention.out.bias,
            "ffn_norm": layer.ffn_norm.weight,
            "gate_up": gate_up.weight,
            "gate_up_bias": gate_up.bias,
            "down": down.weight,
            "down_bias": down.bias,
            "router": mixture.router if mixture is not None else None,
            "correction": mixture.correction if mixture is not None else None,
            "experts_gate_up": mixture.experts.gate_up_EGD if mixture is not None else None,
            "experts_down": mixture.experts.down_EDF if mixture is not None else None,
        }
        experts, choice, scale = (0, 0, 0, 1, 1), (0, 0), 1.0
        if mixture is not None:
            rules, down_EDF = mixture.rules, mixture.experts.down_EDF
            hidden = down_EDF.shape[2] if isinstance(down_EDF, Tensor) else down_EDF[0].shape[1]
            experts = (rules.count, rules.per_token, hidden, rules.groups, rules.top_groups)
            choice, scale = (int(rules.score == "softmax"), int(rules.normalize)), rules.scale
        self.per_token = experts[1]
        self.sizes = (
            layer.attention_norm.weight.shape[0],
            attention.heads,
            attention.kv_heads,
            attention.head_size,
            0 if down.weight is None else down.weight.shape[1],
            *experts,
            attention.window or 0,
            int(attention.interleaved),
            *choice,
        )
        self.factors = (layer.attention_norm.eps, attention.scale, scale)


def known(layer: LayerWeights) -> bool:
    """Whether a layer has only parts that the one call knows."""
    ffn = layer.ffn
    if not isinstance(layer.attention, GroupedQueryWeights) or layer.attention_post_norm is not None:
        return False
    attention = layer.attention
    if attention.beyond is not None or attention.sinks_H is not None or attention.norms_whole:
        return False
    if isinstance(ffn, MixtureWeights):
        more = (ffn.residual, ffn.shared_gate, ffn.router_bias_E, ffn.experts.bias_EG, ffn.down_bias_ED, ffn.beyond)
        return ffn.experts.activation == "silu" and all(part is None for part in more)
    return ffn.activation == "silu"


class FusedLayers:
    """Float32 layers, with the addresses of their weights as they were when last looked at."""

    function = "layers"

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.parts = [Parts(layer) for layer in layers]
        self.alike = len({part.per_token for part in self.parts} - {0}) <= 1
        self.addresses: list[int] = []
        self.fit = False
        self.weights = [weight for part in self.parts for weight in part.weights.values() if weight is not None]
        self.blocks: Any = (self.block_type() * len(self.parts))()

    def block_type(self) -> Any:
        return Block

    def now(self) -> list[int]:
        """Where the weights lie."""
        return [weight.data_ptr() for weight in self.weights]

    def fits(self) -> bool:
        return self.alike and all(float32(weight) for weight in self.weights)

    def block(self, number: int) -> Any:
        part = self.parts[number]
        places = [0 if (weight := part.weights[name]) is None else weight.data_ptr() for name in WEIGHTS]
        return Block(*places, *part.sizes, *part.factors)

    def takes(self) -> bool:
        """Whether all weights are as the call wants them; looked at anew when one has moved."""
        addresses = self.now()
        if addresses != self.addresses:
            self.addresses, self.fit = addresses, self.fits()
            for number in range(len(self.parts)):
                self.blocks[number] = self.block(number)
        return self.fit

    def run(
        self,
        library: Any,
        x_TD: Tensor,
        rope: RopeAngles,
        layout: Batch,
        caches: Sequence[KVCache],
        retained_LS: Any = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """What comes out of the last layer, and the experts that were chosen in each (T, K). Requests have pages, or
        are compact, and then say what they retain (`retained_rows.py`)."""
        tokens, per_token = x_TD.shape[0], max(part.per_token for part in self.parts)
        x_TD, cos_TR, sin_TR = x_TD.contiguous(), rope.cos_TR.contiguous(), rope.sin_TR.contiguous()
        y_TD = torch.empty_like(x_TD)
        routes_LTK = torch.empty(len(self.parts), tokens, per_token, dtype=torch.int64)
        spans_S4, pages_SP = layout.spans_S4, layout.pages_SP
        assert pages_SP is not None or retained_LS is not None
        table, columns = (None, 0) if pages_SP is None else (pages_SP.data_ptr(), pages_SP.shape[1])
        places = [tensor.data_ptr() for cache in caches for tensor in (cache["keys"], cache["values"])]
        call: Callable[..., None] = getattr(library, self.function)
        call(
            ctypes.byref(self.blocks), len(self.parts), x_TD.data_ptr(), y_TD.data_ptr(), routes_LTK.data_ptr(),
            cos_TR.data_ptr(), sin_TR.data_ptr(), cos_TR.shape[1], (ctypes.c_void_p * len(places))(*places),
            spans_S4.data_ptr(), table, tokens, spans_S4.shape[0], columns, caches[0]["keys"].shape[1], per_token,
            None if retained_LS is None else retained_LS.ctypes.data, torch.get_num_threads(),
        )  # fmt: skip
        return y_TD, list(routes_LTK.unbind(0))


def float32(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous()


def takes_step(stack: LayerStack, x_TD: Tensor, layout: Batch, caches: Sequence[KVCache]) -> bool:
    """Whether a step is one to run in one call: few float32 tokens on a CPU, without trees, with a cache."""
    most = MAX_TOKENS if len(stack.layers) == 1 else MAX_STACK_TOKENS
    return (
        len(x_TD) <= most
        and bool(caches)
        and not layout.has_trees
        and not torch.is_grad_enabled()
        and x_TD.is_cpu
        and x_TD.dtype == torch.float32
        and next(iter(caches[0].values())).dtype == torch.float32
    )
