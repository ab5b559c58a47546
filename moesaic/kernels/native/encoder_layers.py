"""All layers of an encoder as one native call (encoder.c): matrices are packed once, and threads take runs of whole
sequences through all layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.interface import Batch, RopeAngles
from moesaic.kernels.layer_weights import EncoderLayerWeights
from moesaic.kernels.native.fused_layers import float32
from moesaic.kernels.native.quantized_fused_layers import Matrix, as_matrix
from moesaic.kernels.quantized import QuantizedMatrix

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3, "tanh": 4}
MATRICES = ("qkv", "qkv_bias", "out", "out_bias", "up", "up_bias", "down", "down_bias")
NORMS = ("attention_norm", "attention_norm_bias", "ffn_norm", "ffn_norm_bias")
SIZES = ("D", "H", "C", "F", "R", "window", "interleaved", "gated", "norm_after", "activation", "rounded")


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in (*MATRICES, *NORMS, "cosine", "sine")),
        *((name, ctypes.c_long) for name in SIZES),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class EncoderLayers:
    """Of weights as they were when last looked at: float32, or matrices of 8 bits that meet rows of 8 bits."""

    def __init__(self, layers: Sequence[EncoderLayerWeights]) -> None:
        self.layers = layers
        weights = [weight for layer in layers for weight in _weights(layer).values() if weight is not None]
        self.rounded = any(isinstance(weight, QuantizedMatrix) for weight in weights)
        self.matrices = [weight for weight in weights if isinstance(weight, QuantizedMatrix) or weight.dim() == 2]
        self.weights = [weight.tiles_XB if isinstance(weight, QuantizedMatrix) else weight for weight in weights]
        self.seen: list[tuple[int, int]] = []
        self.fit = False
        self.packed: list[Tensor] = []
        self.structs: list[Matrix] = []  # of rounded matrices
        self.panels = False  # whether their codes are packed as bytes.h has it
        self.blocks: Any = (Layer * len(layers))()

    def takes(self, library: Any) -> bool:
        """Whether the call knows these layers; packed anew when a weight has moved or changed."""
        seen = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in self.weights]
        if seen != self.seen:
            self.seen, self.fit = seen, self._alike() and all(map(_known, self.layers))
            self.packed, self.structs = [], []
            for number, layer in enumerate(self.layers if self.fit else ()):
                self.blocks[number] = self._block(library, layer)
        return self.fit

    def _alike(self) -> bool:
        matrices = not self.rounded or all(map(_of_bytes, self.matrices))
        return matrices and all(weight.dtype == torch.uint8 or float32(weight) for weight in self.weights)

    def _block(self, library: Any, layer: EncoderLayerWeights) -> Layer:
        found = _weights(layer)
        places = []
        for name in (*MATRICES, *NORMS):
            weight = found[name]
            if isinstance(weight, QuantizedMatrix):
                places.append(self._matrix(library, weight))
                continue
            if weight is not None and weight.dim() == 2:
                weight = self._pack(library, weight)
            places.append(0 if weight is None else weight.data_ptr())
        attention, ffn = layer.attention, layer.ffn
        sizes = (
            attention.qkv.weight.shape[1], attention.heads, attention.head_size, ffn.down.weight.shape[1], 0,
            attention.window or 0, attention.interleaved, layer.gated, layer.norm_after, ACTIVATIONS[ffn.activation],
            2 if self.panels else self.rounded,
        )  # fmt: skip
        return Layer(*places, 0, 0, *map(int, sizes), layer.ffn_norm.eps, attention.scale)

    def _matrix(self, library: Any, weight: QuantizedMatrix) -> int:
        """Where a rounded matrix is told of; its codes are packed in panels where the processor can use them."""
        struct = as_matrix(weight)
        room = library.bytes_room(ctypes.byref(struct))
        self.panels = room > 0
        if self.panels:
            panels = torch.empty(room, dtype=torch.uint8)
            library.pack_bytes(ctypes.byref(struct), panels.data_ptr())
            struct.codes = panels.data_ptr()
            self.packed.append(panels)
        self.structs.append(struct)
        return ctypes.addressof(struct)

    def _pack(self, library: Any, weight_OI: Tensor) -> Tensor:
        outputs, inputs = weight_OI.shape
        packed = torch.empty(library.packed_numbers(outputs, inputs))
        library.pack(weight_OI.data_ptr(), packed.data_ptr(), outputs, inputs)
        self.packed.append(packed)
        return packed

    def run(self, library: Any, x_TD: Tensor, layout: Batch, ropes: Sequence[RopeAngles | None]) -> Tensor:
        spans_S4 = layout.spans_S4
        spans_S4 = spans_S4[spans_S4[:, 0] < spans_S4[:, 1]].contiguous()  # those with tokens
        y_TD = x_TD.clone(memory_format=torch.contiguous_format)
        if not len(spans_S4):
            return y_TD
        held = []
        for block, rope in zip(self.blocks, ropes, strict=True):
            if rope is not None:
                held += [rope.cos_TR.contiguous(), rope.sin_TR.contiguous()]
                block.cosine, block.sine, block.R = held[-2].data_ptr(), held[-1].data_ptr(), held[-1].shape[1]
        blocks = ctypes.byref(self.blocks)
        library.encode(
            blocks, len(self.layers), y_TD.data_ptr(), spans_S4.data_ptr(), len(spans_S4), torch.get_num_threads()
        )
        return y_TD


def _known(layer: EncoderLayerWeights) -> bool:
    return layer.attention.heads == layer.attention.kv_heads and layer.attention.q_norm is None


def _of_bytes(weight: Tensor | QuantizedMatrix) -> bool:
    """Whether rows need rounding but once for it."""
    if not isinstance(weight, QuantizedMatrix) or weight.up_OR is not None:
        return False
    return weight.bits == weight.activation_bits == 8 and weight.group >= weight.shape[1]


def _weights(layer: EncoderLayerWeights) -> dict[str, Tensor | QuantizedMatrix | None]:
    attention, ffn, norm = layer.attention, layer.ffn, layer.attention_norm
    return {
        "qkv": attention.qkv.weight,
        "qkv_bias": attention.qkv.bias,
        "out": attention.out.weight,
        "out_bias": attention.out.bias,
        "up": ffn.gate_up.weight,
        "up_bias": ffn.gate_up.bias,
        "down": ffn.down.weight,
        "down_bias": ffn.down.bias,
        "attention_norm": None if norm is None else norm.weight,
        "attention_norm_bias": None if norm is None else norm.bias,
        "ffn_norm": layer.ffn_norm.weight,
        "ffn_norm_bias": layer.ffn_norm.bias,
    }
