"""Learn on a GPU with the very bits the engine computes: its kernels forward, the library's gradients back.

The trainer's log-probability of a token is then to the bit what the engine recorded when it sampled it. This holds for
what the engine runs as graphed steps.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moesaic.kernels import reference
from moesaic.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from moesaic.kernels.cuda import fast
from moesaic.kernels.cuda.fast import activate as activate
from moesaic.kernels.cuda.fast import attention as attention
from moesaic.kernels.cuda.fast import combine as combine
from moesaic.kernels.cuda.fast import compute_experts as compute_experts
from moesaic.kernels.cuda.fast import dispatch as dispatch
from moesaic.kernels.cuda.fast import embed as embed
from moesaic.kernels.cuda.fast import experts as experts
from moesaic.kernels.cuda.fast import gated as gated
from moesaic.kernels.cuda.fast import index_rows as index_rows
from moesaic.kernels.cuda.fast import layer_norm as layer_norm
from moesaic.kernels.cuda.fast import rotate as rotate
from moesaic.kernels.cuda.fast import run_encoder as run_encoder
from moesaic.kernels.cuda.fast import run_layers as run_layers
from moesaic.kernels.cuda.fast import select_tokens as select_tokens
from moesaic.kernels.cuda.layout_rows import flat_rows
from moesaic.kernels.delta_rule import delta_rule as delta_rule
from moesaic.kernels.exact_forward import exact_forward, exact_matmul, needs_grad
from moesaic.kernels.interface import AttentionCall, LatentCall, Mask, QKNorm, RopeAngles, Routes
from moesaic.kernels.latent_attention import attend_latent as attend_latent_by
from moesaic.kernels.layer_weights import RouteRules
from moesaic.kernels.triton.attention import paged
from moesaic.kernels.triton.attention.paged_rows import prefill_tile
from moesaic.kernels.triton.graph_break import eager


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
    return exact_matmul(fast.linear, x_TI, weight_OI, bias_O)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out_TD: Tensor = exact_forward(
        partial(fast.rms_norm, eps=eps), partial(reference.rms_norm, eps=eps), x_TD, weight_D
    )
    return out_TD


def qk_norm_rope(
    qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
) -> tuple[Tensor, Tensor, Tensor]:
    def run(qkv_TXC: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = None if norm is None else QKNorm(weights[0], weights[1], norm.eps)
        return fast.qk_norm_rope(qkv_TXC, kv_heads, own, rope)

    weights = () if norm is None else (norm.q_C, norm.k_C)
    q_THC, k_TNC, v_TNC = exact_forward(run, run, qkv_TXC, *weights)
    return q_THC, k_TNC, v_TNC


def router_logits(x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
    logits_TE: Tensor = exact_forward(fast.router_logits, reference.router_logits, x_TD, weight_ED)
    return logits_TE


def route(logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None) -> Routes:
    with torch.no_grad():
        routes = fast.route(logits_TE, correction_E, rules, chosen_TK)
    if not needs_grad(logits_TE):
        return routes
    weights_TK = exact_forward(
        lambda _: routes.weights_TK.detach(),  # what is returned has this node, which holds `routes`: a cycle
        lambda same_TE: reference.route(same_TE, None, rules, routes.experts_TK).weights_TK,
        logits_TE,
    )
    return Routes(routes.experts_TK, weights_TK)


@eager
def attend(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
    layout = call.layout
    own = call.bias is None and not call.chunked and call.causal and not layout.has_trees
    if call.cache is not None or not own or not len(q_THC):
        return fast.attend(q_THC, k_TNC, v_TNC, call)

    def summed(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = flat_rows(layout, prefill_tile(q_THC.shape[1] // k_TNC.shape[1], q_THC.dtype == torch.float32))
        keys, values = k_TNC.contiguous().unsqueeze(1), v_TNC.contiguous().unsqueeze(1)
        sums_HT = torch.empty(q_THC.shape[1], len(q_THC), dtype=torch.float32, device=q_THC.device)
        out_THC = paged.attend(
            q_THC, keys, values, rows, call.scale, call.window, sinks_H=sinks_H, sums_HT=sums_HT
        )  # fmt: skip
        return out_THC, sums_HT

    def exact(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, *sinks: Tensor) -> Tensor:
        return summed(q_THC, k_TNC, v_TNC, next(iter(sinks), None))[0]

    def plain(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, *sinks: Tensor) -> Tensor:
        return fast.attend(q_THC, k_TNC, v_TNC, call._replace(sinks_H=next(iter(sinks), None)))

    lengths = [span.new for span in layout.spans]
    if fast.takes_varlen(q_THC, layout) and not fast.cudnn_takes(lengths, q_THC, call):
        return fast.varlen_attention(q_THC, k_TNC, v_TNC, layout, call, summed)
    sinks = () if call.sinks_H is None else (call.sinks_H,)
    out_THC: Tensor = exact_forward(exact, plain, q_THC, k_TNC, v_TNC, *sinks)
    return out_THC


def attend_latent(call: LatentCall) -> Tensor:
    if (out_THV := eager_attend_latent(call)) is not None:
        return out_THV
    return attend_latent_by(call, rms_norm, rotate, attention)


@eager
def eager_attend_latent(call: LatentCall) -> Tensor | None:
    layout = call.attention.layout
    if call.attention.cache is not None or layout.has_trees or not fast.in_latent_space(call):
        return fast.eager_attend_latent(call)

    def exact(q_THC: Tensor, kv_TX: Tensor, norm_K: Tensor, up: Tensor) -> Tensor:
        rows, latents = flat_rows(layout, *fast.latent_tokens(call)), kv_TX.new_empty(len(kv_TX), 1, kv_TX.shape[1])
        return fast.absorbed(call, q_THC, kv_TX, norm_K, up, rows, latents)

    def plain(q_THC: Tensor, kv_TX: Tensor, norm_K: Tensor, up: Tensor) -> Tensor:
        pieces = []
        for span, q, k_MHC, v_MHV in layout.per_sequence(*expanded(call, q_THC, kv_TX, norm_K, up)):
            chosen_TK = None if call.selected is None else call.selected[span.number]
            mask = Mask(call.attention.scale, chosen_TK=chosen_TK)
            pieces.append(fast.attention(q, k_MHC, v_MHV, mask))
        return torch.cat(pieces)

    out_THV: Tensor = exact_forward(exact, plain, call.q_THC, call.kv_TX, call.norm_K, call.up)
    return out_THV


def expanded(
    call: LatentCall, q_THC: Tensor, kv_TX: Tensor, norm_K: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Latent attention's queries, keys and values, as if they were no latent's."""
    size, up_HXK = call.plain_size, up.unflatten(0, (q_THC.shape[1], -1))
    plain_THC, rotated_THC = q_THC.split([size, q_THC.shape[2] - size], dim=2)
    latent_TK, key_TC = kv_TX.split([len(norm_K), kv_TX.shape[1] - len(norm_K)], dim=1)
    key_T1C = rotate(key_TC[:, None], call.rope)
    kv_THX = torch.einsum("tk,hxk->thx", reference.rms_norm(latent_TK, norm_K, call.eps), up_HXK)
    k_THC = torch.cat([kv_THX[..., :size], key_T1C.expand(-1, q_THC.shape[1], -1)], dim=2)
    return torch.cat([plain_THC, rotate(rotated_THC, call.rope)], dim=2), k_THC, kv_THX[..., size:]
