"""Native operations for training: the forward of serving, bit for bit, and a way back that goes over the rows once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.interface import QKNorm, RopeAngles


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.library, ctx.eps = ops.library, eps
        ctx.save_for_backward(x_TD, weight_D)
        y_TD: Tensor = ops.rms_norm(x_TD, weight_D, eps)  # gradients are off in here
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D = ctx.saved_tensors
        x_TD, d_y_TD = x_TD.contiguous(), grads[0].contiguous()
        d_x_TD, d_weight_D = torch.empty_like(x_TD), torch.empty_like(weight_D)
        size = weight_D.shape[0]
        ctx.library.rms_norm_back(
            x_TD.data_ptr(), weight_D.data_ptr(), d_y_TD.data_ptr(), d_x_TD.data_ptr(), d_weight_D.data_ptr(),
            x_TD.numel() // size, size, ctx.eps, torch.get_num_threads(),
        )  # fmt: skip
        return None, d_x_TD, d_weight_D, None


class QKNormRope(torch.autograd.Function):
    """The weights of the norms are arguments of their own, because gradients come back to them."""

    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        qkv_TXC: Tensor,
        kv_heads: int,
        q_weight_C: Tensor | None,
        k_weight_C: Tensor | None,
        eps: float,
        rope: RopeAngles,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.library, ctx.facts = ops.library, (kv_heads, eps, rope.interleaved)
        ctx.save_for_backward(qkv_TXC, q_weight_C, k_weight_C, rope.cos_TR.contiguous(), rope.sin_TR.contiguous())
        norm = None if q_weight_C is None or k_weight_C is None else QKNorm(q_weight_C, k_weight_C, eps)
        q_THC, k_TNC, v_TNC = ops.qk_norm_rope(qkv_TXC, kv_heads, norm, rope)
        return q_THC, k_TNC, v_TNC.contiguous()  # a view of an input may not be returned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TXC, q_weight_C, k_weight_C, cos_TR, sin_TR = ctx.saved_tensors
        kv_heads, eps, interleaved = ctx.facts
        tokens, all_heads, size = qkv_TXC.shape
        d_q_THC, d_k_TNC, d_v_TNC = (grad.contiguous() for grad in grads)
        d_qkv_TXC = torch.empty_like(qkv_TXC)
        d_q_weight_C, d_k_weight_C = (
            None if weight is None else torch.empty_like(weight) for weight in (q_weight_C, k_weight_C)
        )
        ctx.library.heads_back(
            qkv_TXC.data_ptr(), _pointer(q_weight_C), _pointer(k_weight_C), cos_TR.data_ptr(), sin_TR.data_ptr(),
            d_q_THC.data_ptr(), d_k_TNC.data_ptr(), d_v_TNC.data_ptr(), d_qkv_TXC.data_ptr(),
            _pointer(d_q_weight_C), _pointer(d_k_weight_C), tokens, all_heads - 2 * kv_heads, kv_heads, size,
            cos_TR.shape[1], eps, interleaved, torch.get_num_threads(),
        )  # fmt: skip
        return None, d_qkv_TXC, None, d_q_weight_C, d_k_weight_C, None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, gate_up_TG: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(gate_up_TG)
        y_TF: Tensor = ops.gated(gate_up_TG, "silu")
        return y_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (gate_up_TG,) = ctx.saved_tensors
        return None, ctx.ops.gated_back(gate_up_TG.contiguous(), grads[0].contiguous())


class Attend(torch.autograd.Function):
    """Whole sequences side by side, each attending to itself."""

    @staticmethod
    def forward(
        ctx: Any,
        ops: Any,
        q_THC: Tensor,
        k_TNC: Tensor,
        v_TNX: Tensor,
        spans_S4: Tensor,
        scale: float,
        window: int,
        sinks_H: Tensor | None,
    ) -> Tensor:
        tokens, heads, _ = q_THC.shape
        out_THX, sums_TH = q_THC.new_empty(tokens, heads, v_TNX.shape[2]), q_THC.new_empty(tokens, heads)
        facts = scale, window, True, sinks_H
        ops.attend_spans(q_THC, k_TNC, v_TNX, None, None, out_THX, sums_TH, spans_S4, None, [], *facts)
        ctx.library, ctx.facts = ops.library, (scale, window)
        ctx.save_for_backward(q_THC, k_TNC, v_TNX, out_THX, sums_TH, spans_S4, sinks_H)
        return out_THX

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THC, k_TNC, v_TNX, out_THX, sums_TH, spans_S4, sinks_H = ctx.saved_tensors
        scale, window = ctx.facts
        d_out_THX = grads[0].contiguous()
        d_q_THC, d_k_TNC, d_v_TNX = (
            q_THC.new_zeros(q_THC.shape),
            k_TNC.new_empty(k_TNC.shape),
            v_TNX.new_empty(v_TNX.shape),
        )
        ctx.library.attend_back(
            q_THC.data_ptr(), k_TNC.data_ptr(), v_TNX.data_ptr(), out_THX.data_ptr(), sums_TH.data_ptr(),
            d_out_THX.data_ptr(), d_q_THC.data_ptr(), d_k_TNC.data_ptr(), d_v_TNX.data_ptr(), spans_S4.data_ptr(),
            len(spans_S4), q_THC.stride(0), k_TNC.stride(0), v_TNX.stride(0), q_THC.shape[1], k_TNC.shape[1],
            q_THC.shape[2], v_TNX.shape[2], window, scale, torch.get_num_threads(),
        )  # fmt: skip
        d_sinks_H = None
        if sinks_H is not None:  # what a sink weighs is taken from a row that is otherwise a mean of values
            d_sinks_H = -((sinks_H - sums_TH).exp() * (d_out_THX * out_THX).sum(-1)).sum(0)
        return None, d_q_THC, d_k_TNC, d_v_TNX, None, None, None, d_sinks_H
