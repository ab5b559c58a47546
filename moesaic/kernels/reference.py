"""Plain PyTorch: the meaning of every operation, written to be read and to be compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels import Batch, RouteRules

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x_TF: F.gelu(x_TF, approximate="tanh"),
    "relu": F.relu,
}


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_TD = x_TD.float()
    wide_TD = wide_TD * torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * wide_TD.to(x_TD.dtype)


def rotate(x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos_TR.shape[-1]
    turning, still = x_THC[..., :size], x_THC[..., size:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    cos, sin = cos_TR[:, None].to(x_THC.dtype), sin_TR[:, None].to(x_THC.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, still], dim=-1)


def heads(
    qkv_TXC: Tensor,
    kv_heads: int,
    q_weight_C: Tensor | None,
    k_weight_C: Tensor | None,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    interleaved: bool,
    rms_norm: Callable[..., Tensor] = rms_norm,
    rotate: Callable[..., Tensor] = rotate,
) -> tuple[Tensor, Tensor, Tensor]:
    turning = qkv_TXC.shape[1] - kv_heads
    qk_TXC, v_TNC = qkv_TXC.split([turning, kv_heads], dim=1)
    if q_weight_C is not None and k_weight_C is not None:
        q_THC, k_TNC = qk_TXC.split([turning - kv_heads, kv_heads], dim=1)
        qk_TXC = torch.cat([rms_norm(q_THC, q_weight_C, eps), rms_norm(k_TNC, k_weight_C, eps)], dim=1)
    qk_TXC = rotate(qk_TXC, cos_TR, sin_TR, interleaved)
    q_THC, k_TNC = qk_TXC.split([turning - kv_heads, kv_heads], dim=1)
    return q_THC, k_TNC, v_TNC


def visible_TM(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Which of a sequence's tokens each of its last `new` tokens may see."""
    query_T1 = torch.arange(total - new, total, device=device)[:, None]
    key_M = torch.arange(total, device=device)
    seen_TM = key_M <= query_T1
    return seen_TM if window is None else seen_TM & (key_M > query_T1 - window)


def attention(
    q_THC: Tensor,
    k_MNC: Tensor,
    v_MNX: Tensor,
    scale: float,
    window: int | None = None,
    keep_TM: Tensor | None = None,
) -> Tensor:
    group = q_THC.shape[1] // k_MNC.shape[1]
    k_MHC, v_MHX = k_MNC.repeat_interleave(group, dim=1), v_MNX.repeat_interleave(group, dim=1)
    seen_TM = visible_TM(q_THC.shape[0], k_MNC.shape[0], window, q_THC.device)
    if keep_TM is not None:
        seen_TM = seen_TM & keep_TM
    scores_HTM = torch.einsum("thc,mhc->htm", q_THC, k_MHC) * scale
    weights_HTM = scores_HTM.masked_fill(~seen_TM, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.einsum("htm,mhx->thx", weights_HTM.to(v_MHX.dtype), v_MHX)


def attend(
    q_THC: Tensor,
    k_TNC: Tensor,
    v_TNC: Tensor,
    layout: Batch,
    slabs: dict[str, Tensor] | None,
    scale: float,
    window: int | None = None,
    attention: Callable[..., Tensor] = attention,
) -> Tensor:
    if slabs is not None:
        layout.write(slabs["keys"], k_TNC)
        layout.write(slabs["values"], v_TNC)
    pieces = []
    for span, q, k, v in layout.per_sequence(q_THC, k_TNC, v_TNC):
        if slabs is not None and (span.cached or slabs["keys"].dtype != k.dtype):  # or all see what was rounded
            k, v = layout.read(slabs["keys"], span).to(q), layout.read(slabs["values"], span).to(q)
        keep_TM, left = layout.seen(span, window)
        pieces.append(attention(q, k, v, scale, left, keep_TM))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def gated(gate_up_TG: Tensor, activation: str) -> Tensor:
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_TF) * up_TF


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return F.linear(x_TD.float(), weight_ED.float())


def route(
    logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores_TE = logits_TE.softmax(-1) if rules.score == "softmax" else logits_TE.sigmoid()
    routes_TK = best_experts(scores_TE.detach(), correction_E, rules) if chosen_TK is None else chosen_TK
    weights_TK = scores_TE.gather(1, routes_TK)
    if rules.normalize:
        tiny = 1e-20 if rules.score == "sigmoid" else 0.0
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + tiny)
    return routes_TK, weights_TK * rules.scale


def best_experts(scores_TE: Tensor, correction_E: Tensor | None, rules: RouteRules) -> Tensor:
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E.float()
    if rules.groups > 1:
        choice_TGE = choice_TE.unflatten(-1, (rules.groups, -1))
        best_TG = choice_TGE.topk(2, dim=-1).values.sum(-1).topk(rules.top_groups, dim=-1).indices
        closed_TG = torch.ones_like(choice_TGE[..., 0], dtype=torch.bool).scatter(1, best_TG, False)
        choice_TE = choice_TGE.masked_fill(closed_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return choice_TE.topk(rules.per_token, dim=-1).indices


def experts(
    x_TD: Tensor,
    routes_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    activation: str,
) -> Tensor:
    out_TD = torch.zeros_like(x_TD)
    for expert in range(gate_up_EGD.shape[0]):
        token, choice = (routes_TK == expert).nonzero(as_tuple=True)
        if len(token):
            hidden = gated(F.linear(x_TD[token], gate_up_EGD[expert]), activation)
            y = F.linear(hidden, down_EDF[expert]) * weights_TK[token, choice, None]
            out_TD = out_TD.index_add(0, token, y.to(x_TD.dtype))
    return out_TD
