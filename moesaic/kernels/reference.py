"""Plain PyTorch: the meaning of every operation, written to be read and to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from moesaic.kernels.delta_rule import delta_rule as delta_rule
from moesaic.kernels.interface import (
    AttentionCall,
    Batch,
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
from moesaic.kernels.latent_attention import attend_latent as attend_latent_by
from moesaic.kernels.layer_weights import ExpertWeights, NormWeights, RouteRules
from moesaic.kernels.token_selection import select_tokens as select_tokens

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x_TF: F.gelu(x_TF, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
CLAMPED, GATE_LIMIT, GATE_SLOPE = "clamped_swiglu", 7.0, 1.702


def embed(tokens_T: Tensor, table_VD: Tensor, site: str = "") -> Tensor:
    return F.embedding(tokens_T, table_VD)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_TD = x_TD.float()
    wide_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * wide_TD.to(x_TD.dtype)


def layer_norm(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, plus_TD: Tensor | None = None
) -> Tensor:
    sum_TD = x_TD if plus_TD is None else x_TD + plus_TD
    return F.layer_norm(sum_TD, weight_D.shape, weight_D, bias_D, eps)


def activate(x_TF: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](x_TF)


def rotate(x_THC: Tensor, rope: RopeAngles) -> Tensor:
    size = 2 * rope.cos_TR.shape[-1]
    rotated, plain = x_THC[..., :size], x_THC[..., size:]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if rope.interleaved else rotated.chunk(2, dim=-1)
    cos, sin = rope.cos_TR[:, None].to(x_THC.dtype), rope.sin_TR[:, None].to(x_THC.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, plain], dim=-1)


def index_rows(q_THC: Tensor | None, k_TC: Tensor, norm: NormWeights, rope: RopeAngles) -> tuple[Tensor | None, Tensor]:
    k_TC = F.layer_norm(k_TC, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    return None if q_THC is None else rotate(q_THC, rope), rotate(k_TC.unsqueeze(1), rope).squeeze(1)


def qk_norm_rope(
    qkv_TXC: Tensor,
    kv_heads: int,
    norm: QKNorm | None,
    rope: RopeAngles,
    rms_norm: Callable[..., Tensor] = rms_norm,
    rotate: Callable[..., Tensor] = rotate,
) -> tuple[Tensor, Tensor, Tensor]:
    rotated = qkv_TXC.shape[1] - kv_heads
    qk_TXC, v_TNC = qkv_TXC.split([rotated, kv_heads], dim=1)
    if norm is not None:
        q_THC, k_TNC = qk_TXC.split([rotated - kv_heads, kv_heads], dim=1)
        qk_TXC = torch.cat([rms_norm(q_THC, norm.q_C, norm.eps), rms_norm(k_TNC, norm.k_C, norm.eps)], dim=1)
    qk_TXC = rotate(qk_TXC, rope)
    q_THC, k_TNC = qk_TXC.split([rotated - kv_heads, kv_heads], dim=1)
    return q_THC, k_TNC, v_TNC


def visible_TM(
    new: int, total: int, window: int | None, device: torch.device, causal: bool = True, chunked: bool = False
) -> Tensor:
    """Which of a sequence's tokens each of its last `new` tokens may see."""
    query_T1 = torch.arange(total - new, total, device=device)[:, None]
    key_M = torch.arange(total, device=device)
    if not causal:
        return (key_M - query_T1).abs() < (total if window is None else window)
    seen_TM = key_M <= query_T1
    if chunked and window is not None:
        return seen_TM & (key_M // window == query_T1 // window)
    return seen_TM if window is None else seen_TM & (key_M > query_T1 - window)


def mask_for_sdpa(new: int, total: int, mask: Mask, device: torch.device) -> tuple[Tensor | None, bool]:
    """What `scaled_dot_product_attention` is to be told: a mask, or none and whether all is causal."""
    _, window, keep_TM, causal, _, _, chunked = mask.spread(total)
    if new == total and keep_TM is None and (window is None or window >= total):
        return None, causal
    seen_TM = visible_TM(new, total, window, device, causal, chunked)
    return (seen_TM if keep_TM is None else seen_TM & keep_TM), False


def attention(q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
    scale, window, keep_TM, causal, _, sinks_H, chunked = mask.spread(len(k_MNC))
    group = q_THC.shape[1] // k_MNC.shape[1]
    k_MHC, v_MHX = k_MNC.repeat_interleave(group, dim=1), v_MNX.repeat_interleave(group, dim=1)
    seen_TM = visible_TM(q_THC.shape[0], k_MNC.shape[0], window, q_THC.device, causal, chunked)
    if keep_TM is not None:
        seen_TM = seen_TM & keep_TM
    scores_HTM = torch.einsum("thc,mhc->htm", q_THC, k_MHC) * scale
    scores_HTM = scores_HTM.masked_fill(~seen_TM, float("-inf"))
    if sinks_H is not None:
        sinks_HT1 = sinks_H.to(scores_HTM.dtype)[:, None, None].expand(-1, len(q_THC), 1)
        scores_HTM = torch.cat([scores_HTM, sinks_HT1], -1)
    weights_HTM = scores_HTM.softmax(-1, dtype=torch.float32)[..., : len(k_MNC)]
    return torch.einsum("htm,mhx->thx", weights_HTM.to(v_MHX.dtype), v_MHX)


def attend(
    q_THC: Tensor,
    k_TNC: Tensor,
    v_TNC: Tensor,
    call: AttentionCall,
    attention: Callable[..., Tensor] = attention,
) -> Tensor:
    layout, cache = call.layout, call.cache
    if cache is not None:
        layout.write(cache["keys"], k_TNC)
        layout.write(cache["values"], v_TNC)
    pieces = []
    for span, q, k, v in layout.per_sequence(q_THC, k_TNC, v_TNC):
        if cache is not None and (span.cached or cache["keys"].dtype != k.dtype):  # or all see what was rounded
            k, v = layout.read(cache["keys"], span).to(q), layout.read(cache["values"], span).to(q)
        if call.bias is not None:
            pieces.append(biased(q, k, v, call, span.number))
            continue
        keep_TM, left = layout.mask(span, call.window, call.chunked)
        causal = call.causal and keep_TM is None  # a mask says by itself what is hidden: a prefix sees later tokens
        mask = Mask(call.scale, left, keep_TM, causal, None, call.sinks_H, call.chunked)
        pieces.append(attention(q, k, v, mask))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def biased(q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, call: AttentionCall, sequence: int) -> Tensor:
    """All of a sequence's pair bias at once; `biased_attention` takes it in blocks."""
    assert call.bias is not None
    new, total = len(q_THC), len(k_MNC)
    query_T1, key_M = (torch.arange(first, total, device=q_THC.device) for first in (total - new, 0))
    apart_TM = query_T1[:, None] - key_M
    hidden_TM = (apart_TM < 0) & call.bias.causal
    if call.window is not None:
        hidden_TM = hidden_TM | (apart_TM >= call.window)
    group = q_THC.shape[1] // k_MNC.shape[1]
    k_MHC, v_MHX = k_MNC.repeat_interleave(group, dim=1), v_MNX.repeat_interleave(group, dim=1)
    scores_HTM = torch.einsum("thc,mhc->htm", q_THC, k_MHC) * call.scale
    scores_HTM = scores_HTM + call.bias.block(sequence, slice(total - new, total), slice(0, total))
    weights_HTM = scores_HTM.masked_fill(hidden_TM, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.einsum("htm,mhx->thx", weights_HTM.to(v_MHX.dtype), v_MHX)


def attend_latent(call: LatentCall) -> Tensor:
    return attend_latent_by(call, rms_norm, rotate, attention)


def gated(gate_up_TG: Tensor, activation: str) -> Tensor:
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return clamped_swiglu(gate_TF, up_TF) if activation == CLAMPED else ACTIVATIONS[activation](gate_TF) * up_TF


def clamped_swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """gpt-oss's gate: both halves are held within bounds, and up is moved by one."""
    gate_TF, up_TF = gate_TF.clamp(max=GATE_LIMIT), up_TF.clamp(-GATE_LIMIT, GATE_LIMIT)
    return gate_TF * (GATE_SLOPE * gate_TF).sigmoid() * (up_TF + 1)


def router_logits(x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
    return F.linear(x_TD.float(), weight_ED.float())


def route(logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None) -> Routes:
    scores_TE = logits_TE.softmax(-1) if rules.score == "softmax" else logits_TE.sigmoid()
    routes_TK = best_experts(scores_TE.detach(), correction_E, rules) if chosen_TK is None else chosen_TK
    weights_TK = scores_TE.gather(1, routes_TK)
    if rules.normalize:
        tiny = 1e-20 if rules.score == "sigmoid" else 0.0
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + tiny)
    return Routes(routes_TK, weights_TK * rules.scale)


def best_experts(scores_TE: Tensor, correction_E: Tensor | None, rules: RouteRules) -> Tensor:
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E.float()
    if rules.groups > 1:
        choice_TGE = choice_TE.unflatten(-1, (rules.groups, -1))
        best_TG = choice_TGE.topk(2, dim=-1).values.sum(-1).topk(rules.top_groups, dim=-1).indices
        closed_TG = torch.ones_like(choice_TGE[..., 0], dtype=torch.bool).scatter(1, best_TG, False)
        choice_TE = choice_TGE.masked_fill(closed_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return choice_TE.topk(rules.per_token, dim=-1).indices


def dispatch(x_TD: Tensor, routes: Routes, experts: int) -> Dispatched:
    tokens, per_token = routes.experts_TK.shape
    flat_A = routes.experts_TK.reshape(-1)
    order_A = flat_A.argsort(stable=True)
    token_A = order_A // per_token
    weights_A1 = routes.weights_TK.reshape(-1).index_select(0, order_A).unsqueeze(1)
    counts_E = torch.bincount(flat_A, minlength=experts)
    # index_select and index_add, because each is the other's gradient; plain indexing has a far slower one.
    return Dispatched(x_TD.index_select(0, token_A), weights_A1, counts_E, token_A, tokens)


def compute_experts(sent: Dispatched, weights: ExpertWeights) -> Tensor:
    rows = []
    for expert, x_AD in enumerate(sent.x_AD.split(sent.counts_E.tolist())):
        bias_G = None if weights.bias_EG is None else weights.bias_EG[expert]
        hidden_AF = gated(F.linear(x_AD, weights.gate_up_EGD[expert], bias_G), weights.activation)
        rows.append(F.linear(hidden_AF, weights.down_EDF[expert]))
    return (torch.cat(rows) * sent.weights_A1).to(sent.x_AD.dtype)


def combine(y_AD: Tensor, sent: Dispatched) -> Tensor:
    return y_AD.new_zeros(sent.tokens, y_AD.shape[1]).index_add(0, sent.token_A, y_AD)


def experts(x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    sent = dispatch(x_TD, routes, len(weights.gate_up_EGD))
    return combine(compute_experts(sent, weights), sent)


def run_layers(stack: LayerStack, x_TD: Tensor, rope: RopeAngles, layout: Batch, caches: Sequence[KVCache]) -> None:
    return None  # operation by operation


def run_encoder(stack: EncoderStack, x_TD: Tensor, layout: Batch, ropes: Sequence[RopeAngles | None]) -> Tensor | None:
    return None
