"""Few rows on a CPU at the speed of its memory: C kernels, one call per operation, raw pointers in and out.

They work in float32; whatever else is asked goes to `kernels.cpu`, which is library calls, as do matrix products and
attention that want gradients. Without gradients every operation gives a token the same bits alone and in any batch,
and however its sequence was split into steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels import cpu
from moesaic.kernels.biased_attention import attend_biased
from moesaic.kernels.interface import (
    AttentionCall,
    Batch,
    Dispatched,
    KVCache,
    LatentCall,
    LayerStack,
    Mask,
    QKNorm,
    RopeAngles,
    Routes,
)
from moesaic.kernels.latent_attention import attend_latent
from moesaic.kernels.layer_weights import ExpertWeights, RouteRules
from moesaic.kernels.native import build
from moesaic.kernels.native.fused_layers import takes_step
from moesaic.kernels.native.gradients import Attend, QKNormRope, RMSNorm, SwiGLU
from moesaic.kernels.native.quantized_fused_layers import fused
from moesaic.kernels.reference import visible_TM

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "linear": [_POINTER] * 4 + [_LONG] * 4 + [_INT],
    "rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT, _INT],
    "heads": [_POINTER] * 7 + [_LONG] * 6 + [_FLOAT, _INT, _INT],
    "swiglu": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "route": [_POINTER] * 4 + [_LONG] * 5 + [_INT] * 2 + [_FLOAT, _INT],
    "experts": [_POINTER] * 6 + [_LONG] * 5 + [_INT],
    "rms_norm_back": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT, _INT],
    "heads_back": [_POINTER] * 11 + [_LONG] * 5 + [_FLOAT, _INT, _INT],
    "swiglu_back": [_POINTER] * 3 + [_LONG] * 2 + [_INT],
    "layers": [_POINTER, _LONG] + [_POINTER] * 5 + [_LONG] + [_POINTER] * 3 + [_LONG] * 5 + [_INT],
    "attend": [_POINTER] * 10 + [_LONG] * 11 + [_FLOAT, _INT],
    "quantized_layers": [_POINTER, _LONG] + [_POINTER] * 5 + [_LONG] + [_POINTER] * 3 + [_LONG] * 5 + [_INT],
    "quantized_linear": [_POINTER] * 6 + [_LONG] * 7 + [_INT],
    "attend_retained": [_POINTER] * 8 + [_LONG] * 11 + [_FLOAT, _INT],
    "attend_back": [_POINTER] * 10 + [_LONG] * 9 + [_FLOAT, _INT],
}


@cache
def kernels() -> NativeKernels | None:
    """The native kernels of this machine, compiled on the first call; None where there is no compiler."""
    library = build.library(build.cache_folder(), build.compiler())
    return None if library is None else NativeKernels(library)


def _plain(*tensors: Tensor | None) -> bool:
    """Whether these can be handed over as they are: float32 on the CPU, and nobody wants a gradient."""
    return not torch.is_grad_enabled() and _floats(*tensors)


def _trained(*tensors: Tensor | None) -> bool:
    """The same, but a gradient is wanted."""
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return torch.is_grad_enabled() and wanted and _floats(*tensors)


def _floats(*tensors: Tensor | None) -> bool:
    return all(tensor is None or (tensor.dtype == torch.float32 and tensor.is_cpu) for tensor in tensors)


class NativeKernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, None
        self.library: Any = library

    rotate, linear_cross_entropy = staticmethod(cpu.rotate), staticmethod(cpu.linear_cross_entropy)
    dispatch, combine = staticmethod(cpu.dispatch), staticmethod(cpu.combine)
    select_tokens = staticmethod(cpu.select_tokens)

    def run_layers(
        self, stack: LayerStack, x_TD: Tensor, rope: RopeAngles, layout: Batch, caches: Sequence[KVCache]
    ) -> tuple[Tensor, list[Tensor]] | None:
        if not takes_step(stack, x_TD, layout, caches):
            return None
        if "native" not in stack.prepared:
            stack.prepared["native"] = fused(stack.layers)
        layers = stack.prepared["native"]
        return layers.run(self.library, x_TD, rope, layout, caches) if layers is not None and layers.takes() else None

    def embed(self, tokens_T: Tensor, table_VD: Tensor, site: str = "") -> Tensor:
        return F.embedding(tokens_T, table_VD)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        if x_TI.dim() != 2 or not _plain(x_TI, weight_OI, bias_O) or not weight_OI.is_contiguous():
            return cpu.linear(x_TI, weight_OI, bias_O)
        rows, inputs = x_TI.shape
        outputs = weight_OI.shape[0]
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        y_TO = x_TI.new_empty(rows, outputs)
        self.library.linear(
            x_TI.data_ptr(), weight_OI.data_ptr(), _pointer(bias_O), y_TO.data_ptr(),
            rows, inputs, outputs, x_TI.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return y_TO

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if _trained(x_TD, weight_D):
            trained_TD: Tensor = RMSNorm.apply(self, x_TD, weight_D, eps)
            return trained_TD
        if not _plain(x_TD, weight_D):
            return cpu.rms_norm(x_TD, weight_D, eps)
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        size = weight_D.shape[0]
        self.library.rms_norm(
            x_TD.data_ptr(), weight_D.data_ptr(), y_TD.data_ptr(),
            x_TD.numel() // size, size, eps, torch.get_num_threads(),
        )  # fmt: skip
        return y_TD

    def qk_norm_rope(
        self, qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_C, k_C, eps = (None, None, 0.0) if norm is None else (norm.q_C, norm.k_C, norm.eps)
        if _trained(qkv_TXC, q_C, k_C, rope.cos_TR, rope.sin_TR) and qkv_TXC.is_contiguous():
            trained: tuple[Tensor, Tensor, Tensor] = QKNormRope.apply(self, qkv_TXC, kv_heads, q_C, k_C, eps, rope)
            return trained
        if not _plain(qkv_TXC, q_C, k_C, rope.cos_TR, rope.sin_TR) or not qkv_TXC.is_contiguous():
            return cpu.qk_norm_rope(qkv_TXC, kv_heads, norm, rope)
        tokens, all_heads, size = qkv_TXC.shape
        heads = all_heads - 2 * kv_heads
        q_THC, k_TNC = qkv_TXC.new_empty(tokens, heads, size), qkv_TXC.new_empty(tokens, kv_heads, size)
        cos_TR, sin_TR = rope.cos_TR.contiguous(), rope.sin_TR.contiguous()
        self.library.heads(
            qkv_TXC.data_ptr(), _pointer(q_C), _pointer(k_C), cos_TR.data_ptr(), sin_TR.data_ptr(),
            q_THC.data_ptr(), k_TNC.data_ptr(), tokens, heads, kv_heads, size, cos_TR.shape[1],
            all_heads * size, eps, rope.interleaved, torch.get_num_threads(),
        )  # fmt: skip
        return q_THC, k_TNC, qkv_TXC[:, heads + kv_heads :]

    def gated(self, gate_up_TG: Tensor, activation: str) -> Tensor:
        if activation == "silu" and gate_up_TG.dim() == 2 and _trained(gate_up_TG):
            trained_TF: Tensor = SwiGLU.apply(self, gate_up_TG)
            return trained_TF
        if activation != "silu" or gate_up_TG.dim() != 2 or not _plain(gate_up_TG):
            return cpu.gated(gate_up_TG, activation)
        rows, both = gate_up_TG.shape
        gate_up_TG = gate_up_TG.contiguous()
        y_TF = gate_up_TG.new_empty(rows, both // 2)
        self.library.swiglu(gate_up_TG.data_ptr(), y_TF.data_ptr(), rows, both // 2, torch.get_num_threads())
        return y_TF

    def gated_back(self, gate_up_TG: Tensor, d_y_TF: Tensor) -> Tensor:
        """The gradient of SwiGLU; all float32, side by side."""
        d_gate_up_TG = torch.empty_like(gate_up_TG)
        self.library.swiglu_back(
            gate_up_TG.data_ptr(), d_y_TF.data_ptr(), d_gate_up_TG.data_ptr(), *d_y_TF.shape, torch.get_num_threads()
        )
        return d_gate_up_TG

    def router_logits(self, x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
        return self.linear(x_TD.float(), weight_ED.float())

    def route(
        self, logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
    ) -> Routes:
        if not _plain(logits_TE, correction_E) or (chosen_TK is not None and chosen_TK.dtype != torch.int64):
            return cpu.route(logits_TE, correction_E, rules, chosen_TK)
        tokens, experts = logits_TE.shape
        logits_TE = logits_TE.contiguous()
        routes_TK = logits_TE.new_empty(tokens, rules.per_token, dtype=torch.int64) if chosen_TK is None else chosen_TK
        routes_TK = routes_TK.contiguous()
        weights_TK = logits_TE.new_empty(routes_TK.shape)
        self.library.route(
            logits_TE.data_ptr(), _pointer(correction_E), routes_TK.data_ptr(),
            weights_TK.data_ptr(), tokens, experts, routes_TK.shape[1], rules.groups, rules.top_groups,
            rules.score == "softmax", rules.normalize, rules.scale, chosen_TK is not None,
        )  # fmt: skip
        return Routes(routes_TK, weights_TK)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        gate_up_EGD, down_EDF, routes_TK = weights.gate_up_EGD, weights.down_EDF, routes.experts_TK
        whole = gate_up_EGD.is_contiguous() and down_EDF.is_contiguous() and routes_TK.dtype == torch.int64
        plain = _plain(x_TD, routes.weights_TK, gate_up_EGD, down_EDF)
        if weights.activation != "silu" or not whole or not plain:
            return cpu.experts(x_TD, routes, weights, self.gated)
        tokens, per_token = routes_TK.shape
        count, hidden, width = down_EDF.shape
        x_TD, routes_TK, weights_TK = x_TD.contiguous(), routes_TK.contiguous(), routes.weights_TK.contiguous()
        y_TD = torch.empty_like(x_TD)
        self.library.experts(
            x_TD.data_ptr(), routes_TK.data_ptr(), weights_TK.data_ptr(), gate_up_EGD.data_ptr(), down_EDF.data_ptr(),
            y_TD.data_ptr(), tokens, hidden, width, count, per_token, torch.get_num_threads(),
        )  # fmt: skip
        return y_TD

    def compute_experts(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        return cpu.compute_experts(sent, weights, self.gated)

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        if call.bias is not None:
            return attend_biased(q_THC, k_TNC, v_TNC, call)
        layout, cache = call.layout, call.cache
        keys, values = (cache["keys"], cache["values"]) if cache is not None else (None, None)
        rows = (q_THC, k_TNC, v_TNC)
        if _trained(*rows) and cache is None and not layout.has_trees and all(map(packed, rows)):
            trained_THC: Tensor = Attend.apply(self, *rows, layout.spans_S4, call.scale, call.window)
            return trained_THC
        if not _plain(*rows, keys, values) or not all(map(packed, rows)):
            return cpu.attend(q_THC, k_TNC, v_TNC, call)
        masks = [layout.mask(span, call.window)[0] for span in layout.spans] if layout.has_trees else []
        out_THC = q_THC.new_empty(q_THC.shape)
        self.attend_spans(
            q_THC, k_TNC, v_TNC, keys, values, out_THC, None, layout.spans_S4, layout.pages_SP, masks, call.scale,
            call.window,
        )  # fmt: skip
        return out_THC

    def attend_latent(self, call: LatentCall) -> Tensor:
        return attend_latent(call, self.rms_norm, self.rotate, self.attention)

    def attention(self, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
        scale, window, keep_TM = mask
        rows = (q_THC, k_MNC, v_MNX)
        if not _plain(*rows) or not all(map(packed, rows)):
            return cpu.attention(q_THC, k_MNC, v_MNX, mask)
        new, total = q_THC.shape[0], k_MNC.shape[0]
        span_14 = torch.tensor([[0, new, total - new, 0]])
        if keep_TM is not None:
            keep_TM = keep_TM & visible_TM(new, total, window, q_THC.device)
        out_THX = q_THC.new_empty(new, q_THC.shape[1], v_MNX.shape[2])
        self.attend_spans(q_THC, k_MNC, v_MNX, None, None, out_THX, None, span_14, None, [keep_TM], scale, window)
        return out_THX

    def attend_spans(
        self,
        q_THC: Tensor,
        k_TNC: Tensor,
        v_TNX: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        out_THX: Tensor,
        sums_TH: Tensor | None,
        spans_S4: Tensor,
        pages_SP: Tensor | None,
        masks: list[Tensor | None],
        scale: float,
        window: int | None,
    ) -> None:
        masks = [mask if mask is None else mask.contiguous() for mask in masks]
        addresses = [0 if mask is None else mask.data_ptr() for mask in masks]
        addresses_S = torch.tensor(addresses) if any(addresses) else None
        size = 0 if keys is None else keys.shape[1]
        self.library.attend(
            q_THC.data_ptr(), k_TNC.data_ptr(), v_TNX.data_ptr(), _pointer(keys), _pointer(values), out_THX.data_ptr(),
            _pointer(sums_TH), spans_S4.data_ptr(), _pointer(pages_SP), _pointer(addresses_S),
            len(spans_S4), 0 if pages_SP is None else pages_SP.shape[1], size,
            q_THC.stride(0), k_TNC.stride(0), v_TNX.stride(0),
            q_THC.shape[1], k_TNC.shape[1], q_THC.shape[2], v_TNX.shape[2], window or 0, scale,
            torch.get_num_threads(),
        )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def packed(x_THC: Tensor) -> bool:
    """Whether each token's heads lie side by side; tokens may lie apart."""
    return x_THC.stride(2) == 1 and x_THC.stride(1) == x_THC.shape[2]
