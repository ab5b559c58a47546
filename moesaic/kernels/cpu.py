"""What is fastest on a CPU with library calls. `docs/LOG.md` has the measurements behind the choices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels import reference
from moesaic.kernels.biased_attention import attend_biased
from moesaic.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from moesaic.kernels.delta_rule import delta_rule_in_chunks
from moesaic.kernels.interface import AttentionCall, Dispatched, LatentCall, Mask, QKNorm, RopeAngles, Routes
from moesaic.kernels.latent_attention import attend_latent as attend_latent_by
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.reference import activate as activate
from moesaic.kernels.reference import combine as combine
from moesaic.kernels.reference import dispatch as dispatch
from moesaic.kernels.reference import embed as embed
from moesaic.kernels.reference import index_rows as index_rows
from moesaic.kernels.reference import layer_norm as layer_norm
from moesaic.kernels.reference import mask_for_sdpa
from moesaic.kernels.reference import rotate as rotate
from moesaic.kernels.reference import route as route
from moesaic.kernels.reference import run_encoder as run_encoder
from moesaic.kernels.reference import run_layers as run_layers
from moesaic.kernels.reference import select_tokens as select_tokens

# One row runs at memory speed (a matrix-vector product); the matrix-matrix path starts four times slower and only
# catches up at five rows, so a few rows are cheaper one at a time.
FEW_ROWS = 4

delta_rule = delta_rule_in_chunks


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
    if 1 < x_TI.shape[0] <= FEW_ROWS and not torch.is_grad_enabled():
        return torch.cat([F.linear(row_1I, weight_OI, bias_O) for row_1I in x_TI.split(1)])
    return F.linear(x_TI, weight_OI, bias_O)


def router_logits(x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
    return linear(x_TD.float(), weight_ED.float())


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    trained = torch.is_grad_enabled() and (x_TD.requires_grad or weight_D.requires_grad)
    if trained and x_TD.dtype == torch.float32:  # squares of half precision overflow
        out_TD: Tensor = _RMSNorm.apply(x_TD, weight_D, eps)
        return out_TD
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def qk_norm_rope(
    qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.qk_norm_rope(qkv_TXC, kv_heads, norm, rope, rms_norm, rotate)


def gated(gate_up_TG: Tensor, activation: str) -> Tensor:
    if activation == "silu" and torch.is_grad_enabled() and gate_up_TG.requires_grad:
        out_TF: Tensor = _SwiGLU.apply(gate_up_TG)
        return out_TF
    return reference.gated(gate_up_TG, activation)


class _SwiGLU(torch.autograd.Function):
    """Keeps the sigmoid for the way back, which is most of the work, and writes both gradients in place."""

    @staticmethod
    def forward(ctx: Any, gate_up_TG: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
        sigmoid_TF = gate_TF.sigmoid()
        ctx.save_for_backward(gate_up_TG, sigmoid_TF)
        return (gate_TF * sigmoid_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (d_out_TF,) = grads
        gate_up_TG, sigmoid_TF = ctx.saved_tensors
        gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
        d_gate_up_TG = torch.empty_like(gate_up_TG)
        d_gate_TF, d_up_TF = d_gate_up_TG.chunk(2, dim=-1)
        silu_TF = gate_TF * sigmoid_TF
        torch.mul(d_out_TF, silu_TF, out=d_up_TF)
        # The slope of silu is sigmoid + silu * (1 - sigmoid).
        slope_TF = silu_TF.addcmul_(silu_TF, sigmoid_TF, value=-1).add_(sigmoid_TF)
        torch.mul(d_out_TF, up_TF, out=d_gate_TF).mul_(slope_TF)
        return d_gate_up_TG


class _RMSNorm(torch.autograd.Function):
    """The library's gradient goes over the rows some fifteen times; this one five."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        spread_T1 = torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_TD, weight_D, spread_T1)
        return x_TD * spread_T1 * weight_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (d_out_TD,) = grads
        x_TD, weight_D, spread_T1 = ctx.saved_tensors
        product_TD = d_out_TD * x_TD
        d_weight_D = (spread_T1.reshape(1, -1) @ product_TD.flatten(0, -2)).squeeze(0)
        mean_T1 = (product_TD @ weight_D).unsqueeze(-1) / weight_D.numel()
        d_x_TD = (d_out_TD * weight_D).mul_(spread_T1)
        return d_x_TD.addcmul_(x_TD, spread_T1.pow(3).mul_(mean_T1), value=-1), d_weight_D, None


def attention(q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
    if mask.sinks_H is not None:  # the library's kernel knows none
        return reference.attention(q_THC, k_MNC, v_MNX, mask)
    mask = mask.spread(len(k_MNC))
    scale, window, keep_TM, *_ = mask
    new, heads, size = q_THC.shape
    total, kv_heads, value_size = v_MNX.shape
    group = heads // kv_heads
    if window is not None and window < total and new == 1:
        first = (total - 1) // window * window if mask.chunked else total - window
        k_MNC, v_MNX = k_MNC[first:], v_MNX[first:]
        keep_TM = keep_TM if keep_TM is None else keep_TM[:, first:]
    if value_size < size:  # the fused kernel wants keys and values of one size
        v_MNX = F.pad(v_MNX, (0, size - value_size))
    k_N1MC, v_N1MX = k_MNC.transpose(0, 1).unsqueeze(1), v_MNX.transpose(0, 1).unsqueeze(1)
    if new == 1:
        # Query heads that share a key head become the rows of one product: the cache is read once, and not copied.
        q_N1GC = q_THC.view(kv_heads, 1, group, size)
        out_N1GX = F.scaled_dot_product_attention(q_N1GC, k_N1MC, v_N1MX, attn_mask=keep_TM, scale=scale)
        return out_N1GX.reshape(1, heads, -1)[..., :value_size]
    seen_TM, causal = mask_for_sdpa(new, total, mask, q_THC.device)
    out_NGTX = F.scaled_dot_product_attention(
        q_THC.view(new, kv_heads, group, size).permute(1, 2, 0, 3),
        k_N1MC.expand(-1, group, -1, -1),
        v_N1MX.expand(-1, group, -1, -1),
        attn_mask=seen_TM,
        is_causal=causal,
        scale=scale,
    )
    return out_NGTX.permute(2, 0, 1, 3).reshape(new, heads, -1)[..., :value_size]


def attend(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
    if call.bias is not None:
        return attend_biased(q_THC, k_TNC, v_TNC, call)
    return reference.attend(q_THC, k_TNC, v_TNC, call, attention)


def attend_latent(call: LatentCall) -> Tensor:
    return attend_latent_by(call, rms_norm, rotate, attention)


def compute_experts(sent: Dispatched, weights: ExpertWeights, gated: Any = gated) -> Tensor:
    both_AG = _grouped(sent.x_AD, weights.gate_up_EGD, sent.counts_E)
    if weights.bias_EG is not None:
        both_AG = both_AG + weights.bias_EG.repeat_interleave(sent.counts_E, dim=0)
    hidden_AF = gated(both_AG, weights.activation)
    return _grouped(hidden_AF * sent.weights_A1.to(hidden_AF.dtype), weights.down_EDF, sent.counts_E)


def experts(x_TD: Tensor, routes: Routes, weights: ExpertWeights, gated: Any = gated) -> Tensor:
    if len(x_TD) <= FEW_ROWS and not torch.is_grad_enabled():
        return _few_tokens(x_TD, routes, weights)
    sent = dispatch(x_TD, routes, len(weights.gate_up_EGD))
    return combine(compute_experts(sent, weights, gated), sent)


def _grouped(x_AI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Rows sorted by expert, each run of them through its expert's matrix."""
    inputs, outputs = weight_EOI.shape[-1], weight_EOI.shape[-2]
    if inputs * x_AI.itemsize % 16 == 0 and outputs * x_AI.itemsize % 16 == 0:  # what the library's kernel asks for
        return F.grouped_mm(x_AI, weight_EOI.transpose(-2, -1), offs=counts_E.cumsum(0).to(torch.int32))
    runs = x_AI.split(counts_E.tolist())
    return torch.cat([F.linear(run, weight_EOI[expert]) for expert, run in enumerate(runs)])


def _few_tokens(x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Matrix-vector products at memory speed, with the routing weight folded into the small hidden vector."""
    gate_up_EGD, down_EDF = weights.gate_up_EGD, weights.down_EDF
    out_TD = torch.empty_like(x_TD)
    for token, chosen in enumerate(routes.experts_TK.tolist()):
        x_D = x_TD[token]
        hidden_KG = torch.stack([torch.mv(gate_up_EGD[expert], x_D) for expert in chosen])
        if weights.bias_EG is not None:
            hidden_KG += weights.bias_EG[chosen]
        hidden_KF = reference.gated(hidden_KG, weights.activation)
        hidden_KF *= routes.weights_TK[token].to(x_TD.dtype)[:, None]
        out_D = out_TD[token]
        torch.mv(down_EDF[chosen[0]], hidden_KF[0], out=out_D)
        for choice, expert in enumerate(chosen[1:], 1):
            out_D.addmv_(down_EDF[expert], hidden_KF[choice])
    return out_TD
