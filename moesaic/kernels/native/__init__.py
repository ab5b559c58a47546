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
from moesaic.kernels.exact_forward import needs_grad
from moesaic.kernels.interface import (
    AttentionCall,
    Batch,
    DeltaCall,
    Dispatched,
    EncoderStack,
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
from moesaic.kernels.native import build, delta_rule
from moesaic.kernels.native.encoder_layers import ACTIVATIONS, EncoderLayers
from moesaic.kernels.native.fused_layers import FusedLayers, takes_step
from moesaic.kernels.native.gradients import Attend, QKNormRope, RMSNorm, SwiGLU
from moesaic.kernels.native.quantized_fused_layers import fused
from moesaic.kernels.native.signatures import LONG, NUMBERS, SIGNATURES
from moesaic.kernels.reference import CLAMPED, visible_TM
from moesaic.kernels.token_selection import best_tokens, select_tokens

GATES = ("silu", CLAMPED, "sigmoid")  # that native code has, by number; experts have the first two


def kernels() -> NativeKernels | None:
    """The native kernels of this machine, compiled on the first call; None where they could not be."""
    found = built()
    return found if isinstance(found, NativeKernels) else None


@cache
def built() -> NativeKernels | build.NotBuilt:
    """They, or why they are not there, which is also said aloud once: nothing else tells, but for the time it takes."""
    try:
        return NativeKernels(build.library(build.cache_folder(), build.compiler()))
    except build.NotBuilt as problem:
        build.logger.warning("no compiled kernels, which makes a CPU slow: %s (see moesaic doctor)", problem)
        return problem


def _plain(*tensors: Tensor | None) -> bool:
    """Whether these can be handed over as they are: float32 on the CPU, and nobody wants a gradient."""
    return _floats(*tensors) and not needs_grad(*tensors)


def _trained(*tensors: Tensor | None) -> bool:
    """The same, but a gradient is wanted."""
    return _floats(*tensors) and needs_grad(*tensors)


def _floats(*tensors: Tensor | None) -> bool:
    return all(tensor is None or (tensor.dtype == torch.float32 and tensor.is_cpu) for tensor in tensors)


class NativeKernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, LONG if name in NUMBERS else None
        self.library: Any = library

    rotate, linear_cross_entropy = staticmethod(cpu.rotate), staticmethod(cpu.linear_cross_entropy)
    index_rows = staticmethod(cpu.index_rows)
    dispatch, combine = staticmethod(cpu.dispatch), staticmethod(cpu.combine)

    def select_tokens(
        self, q_THC: Tensor, k_TC: Tensor, weights_TH: Tensor, layout: Batch, cache: KVCache | None, topk: int
    ) -> list[Tensor | None]:
        return select_tokens(q_THC, k_TC, weights_TH, layout, cache, topk, self.best_tokens)

    def best_tokens(self, q_THC: Tensor, k_MC: Tensor, weights_TH: Tensor, position_T: Tensor, topk: int) -> Tensor:
        """Of the last tokens of a sequence."""
        if not _plain(q_THC, k_MC, weights_TH) or k_MC.stride(1) != 1:
            return best_tokens(q_THC, k_MC, weights_TH, position_T, topk)
        q_THC, weights_TH = q_THC.contiguous(), weights_TH.contiguous()
        new, heads, size = q_THC.shape
        chosen_TK = torch.empty(new, topk, dtype=torch.int32)
        self.library.select_tokens(
            q_THC.data_ptr(), k_MC.data_ptr(), weights_TH.data_ptr(), chosen_TK.data_ptr(), new, len(k_MC),
            k_MC.stride(0), heads, size, topk, size**-0.5, torch.get_num_threads(),
        )  # fmt: skip
        return chosen_TK

    def run_layers(
        self, stack: LayerStack, x_TD: Tensor, rope: RopeAngles, layout: Batch, caches: Sequence[KVCache]
    ) -> tuple[Tensor, list[Tensor]] | None:
        layers = self._fused(stack) if takes_step(stack, x_TD, layout, caches) else None
        return None if layers is None else layers.run(self.library, x_TD, rope, layout, caches)

    def _fused(self, stack: LayerStack) -> FusedLayers | None:
        if "native" not in stack.prepared:
            stack.prepared["native"] = fused(stack.layers)
        layers: FusedLayers | None = stack.prepared["native"]
        return layers if layers is not None and layers.takes() else None

    def run_retained_layers(
        self, stack: LayerStack, x_TD: Tensor, rope: RopeAngles, layout: Batch, cache: KVCache, retained_LS: Any
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The same for requests that are compact: where in `cache`, the keys and values of all layers, each layer of
        each request has its rows is in records (`native/retained_rows.py`)."""
        caches = [cache] * len(stack.layers)
        layers = self._fused(stack) if takes_step(stack, x_TD, layout, caches) else None
        return None if layers is None else layers.run(self.library, x_TD, rope, layout, caches, retained_LS)

    def attend_retained(
        self, q_THC: Tensor, cache: KVCache, spans_S4: Tensor, retained_S: Any, kv_heads: int, scale: float
    ) -> Tensor:
        """Attention of one layer over compact requests, whose new keys and values are in `cache` already."""
        out_THC = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
        heads, size = q_THC.shape[1:]
        self.library.attend_retained(
            q_THC.contiguous().data_ptr(), cache["keys"].data_ptr(), cache["values"].data_ptr(), out_THC.data_ptr(),
            spans_S4.data_ptr(), retained_S.ctypes.data, len(spans_S4), heads, kv_heads, size, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_THC

    def run_encoder(
        self, stack: EncoderStack, x_TD: Tensor, layout: Batch, ropes: Sequence[RopeAngles | None]
    ) -> Tensor | None:
        if not _plain(x_TD):
            return None
        if "native" not in stack.prepared:
            stack.prepared["native"] = EncoderLayers(stack.layers)
        layers: EncoderLayers = stack.prepared["native"]
        return layers.run(self.library, x_TD, layout, ropes) if layers.takes(self.library) else None

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
        if activation not in GATES or gate_up_TG.dim() != 2 or not _plain(gate_up_TG):
            return cpu.gated(gate_up_TG, activation)
        rows, both = gate_up_TG.shape
        gate_up_TG = gate_up_TG.contiguous()
        y_TF = gate_up_TG.new_empty(rows, both // 2)
        places = gate_up_TG.data_ptr(), y_TF.data_ptr()
        self.library.swiglu(*places, rows, both // 2, GATES.index(activation), torch.get_num_threads())
        return y_TF

    def gated_back(self, gate_up_TG: Tensor, d_y_TF: Tensor) -> Tensor:
        """The gradient of SwiGLU; all float32, side by side."""
        d_gate_up_TG = torch.empty_like(gate_up_TG)
        self.library.swiglu_back(
            gate_up_TG.data_ptr(), d_y_TF.data_ptr(), d_gate_up_TG.data_ptr(), *d_y_TF.shape, torch.get_num_threads()
        )
        return d_gate_up_TG

    def layer_norm(
        self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, plus_TD: Tensor | None = None
    ) -> Tensor:
        if not _plain(x_TD, weight_D, bias_D, plus_TD):
            return cpu.layer_norm(x_TD, weight_D, bias_D, eps, plus_TD)
        x_TD = x_TD.contiguous()
        plus_TD = None if plus_TD is None else plus_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        size = weight_D.shape[0]
        self.library.layer_norm(
            x_TD.data_ptr(), _pointer(plus_TD), weight_D.data_ptr(), _pointer(bias_D), y_TD.data_ptr(),
            x_TD.numel() // size, size, eps, torch.get_num_threads(),
        )  # fmt: skip
        return y_TD

    def activate(self, x_TF: Tensor, activation: str) -> Tensor:
        if x_TF.dim() != 2 or not _plain(x_TF) or not x_TF.is_contiguous():
            return cpu.activate(x_TF, activation)
        rows, size = x_TF.shape
        self.library.activate(x_TF.data_ptr(), rows, size, size, 0, ACTIVATIONS[activation], torch.get_num_threads())
        return x_TF

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
        plain = _plain(x_TD, routes.weights_TK, gate_up_EGD, down_EDF, weights.bias_EG)
        if weights.activation not in GATES[:2] or not whole or not plain:
            return cpu.experts(x_TD, routes, weights, self.gated)
        tokens, per_token = routes_TK.shape
        count, hidden, width = down_EDF.shape
        x_TD, routes_TK, weights_TK = x_TD.contiguous(), routes_TK.contiguous(), routes.weights_TK.contiguous()
        y_TD = torch.empty_like(x_TD)
        self.library.experts(
            x_TD.data_ptr(), routes_TK.data_ptr(), weights_TK.data_ptr(), gate_up_EGD.data_ptr(), down_EDF.data_ptr(),
            _pointer(weights.bias_EG), y_TD.data_ptr(), tokens, hidden, width, count, per_token,
            weights.activation == CLAMPED, torch.get_num_threads(),
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
        alone = cache is None and call.causal and not layout.has_trees
        if _trained(*rows, call.sinks_H) and alone and all(map(packed, rows)):
            trained_THC: Tensor = Attend.apply(self, *rows, layout.spans_S4, call.scale, reach(call), call.sinks_H)
            return trained_THC
        if not _plain(*rows, keys, values, call.sinks_H) or not all(map(packed, rows)):
            return cpu.attend(q_THC, k_TNC, v_TNC, call)
        reached = call.window, call.chunked
        masks = [layout.mask(span, *reached)[0] for span in layout.spans] if layout.has_trees else []
        out_THC = q_THC.new_empty(q_THC.shape)
        self.attend_spans(
            q_THC, k_TNC, v_TNC, keys, values, out_THC, None, layout.spans_S4, layout.pages_SP, masks, call.scale,
            reach(call), call.causal, call.sinks_H,
        )  # fmt: skip
        return out_THC

    def delta_rule(self, call: DeltaCall) -> Tensor:
        rows = call.qkv_TX, call.strength_TH, call.decay_TH
        if not _plain(*rows, call.taps_XW, call.log_rate_H, call.shift_H) or any(x_T.stride(1) != 1 for x_T in rows):
            return cpu.delta_rule(call)
        return delta_rule.run(self.library, call)

    def attend_latent(self, call: LatentCall) -> Tensor:
        gathers = _plain(call.q_THC, call.kv_TX, call.norm_K, *(call.up,) if isinstance(call.up, Tensor) else ())
        return attend_latent(call, self.rms_norm, self.rotate, self.attention, gathers)

    def attention(self, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
        if mask.chosen_TK is not None:
            return self._attend_to_chosen(q_THC, k_MNC, v_MNX, mask)
        scale, window, keep_TM, causal, _, sinks_H, chunked = mask
        rows = (q_THC, k_MNC, v_MNX)
        if not causal or not _plain(*rows, sinks_H) or not all(map(packed, rows)):
            return cpu.attention(q_THC, k_MNC, v_MNX, mask)
        new, total = q_THC.shape[0], k_MNC.shape[0]
        span_14 = torch.tensor([[0, new, total - new, 0]])
        if keep_TM is not None:
            keep_TM = keep_TM & visible_TM(new, total, window, q_THC.device, chunked=chunked)
        out_THX = q_THC.new_empty(new, q_THC.shape[1], v_MNX.shape[2])
        facts = scale, reach(mask), True, sinks_H
        self.attend_spans(q_THC, k_MNC, v_MNX, None, None, out_THX, None, span_14, None, [keep_TM], *facts)
        return out_THX

    def _attend_to_chosen(self, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
        chosen_TK = mask.chosen_TK
        assert chosen_TK is not None
        if not _plain(q_THC, k_MNC, v_MNX) or not all(x.stride(2) == 1 for x in (k_MNC, v_MNX)):
            return cpu.attention(q_THC, k_MNC, v_MNX, mask)
        q_THC = q_THC.contiguous()
        # Of one head, tokens may lie as they like; of latents, values are a part.
        k_MNC, v_MNX = (x if packed(x) or x.shape[1] == 1 else x.contiguous() for x in (k_MNC, v_MNX))
        new, heads, size = q_THC.shape
        out_THX = q_THC.new_empty(new, heads, v_MNX.shape[2])
        if k_MNC.shape[1] == 1 < heads and k_MNC.data_ptr() == v_MNX.data_ptr():
            self.library.attend_latents(
                q_THC.data_ptr(), k_MNC.data_ptr(), chosen_TK.data_ptr(), out_THX.data_ptr(), new, chosen_TK.shape[1],
                k_MNC.stride(0), heads, size, v_MNX.shape[2], mask.scale, torch.get_num_threads(),
            )  # fmt: skip
            return out_THX
        self.library.attend_to_chosen(
            q_THC.data_ptr(), k_MNC.data_ptr(), v_MNX.data_ptr(), chosen_TK.data_ptr(), out_THX.data_ptr(), new,
            chosen_TK.shape[1], q_THC.stride(0), k_MNC.stride(0), v_MNX.stride(0), heads, k_MNC.shape[1], size,
            v_MNX.shape[2], mask.scale, torch.get_num_threads(),
        )  # fmt: skip
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
        window: int,
        causal: bool = True,
        sinks_H: Tensor | None = None,
    ) -> None:
        masks = [mask if mask is None else mask.contiguous() for mask in masks]
        addresses = [0 if mask is None else mask.data_ptr() for mask in masks]
        addresses_S = torch.tensor(addresses) if any(addresses) else None
        size = 0 if keys is None else keys.shape[1]
        self.library.attend(
            q_THC.data_ptr(), k_TNC.data_ptr(), v_TNX.data_ptr(), _pointer(keys), _pointer(values), out_THX.data_ptr(),
            _pointer(sums_TH), _pointer(sinks_H), spans_S4.data_ptr(), _pointer(pages_SP), _pointer(addresses_S),
            len(spans_S4), 0 if pages_SP is None else pages_SP.shape[1], size,
            q_THC.stride(0), k_TNC.stride(0), v_TNX.stride(0),
            q_THC.shape[1], k_TNC.shape[1], q_THC.shape[2], v_TNX.shape[2], window, scale, not causal,
            torch.get_num_threads(),
        )  # fmt: skip


def reach(of: AttentionCall | Mask) -> int:
    """As native code has it: how far back a token sees, 0 for all; below 0, within chunks of so many."""
    return 0 if of.window is None else -of.window if of.chunked else of.window


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def packed(x_THC: Tensor) -> bool:
    """Whether each token's heads lie side by side; tokens may lie apart."""
    return x_THC.stride(2) == 1 and x_THC.stride(1) == x_THC.shape[2]
