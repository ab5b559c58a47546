"""What is fastest on a GPU: Triton experts and paged attention, library attention in training.

Without gradients every operation over a paged cache gives a token the same bits alone and in any batch, those of the
engine's graphed steps. Where a kernel does not take a shape or a format, the library does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moesaic.kernels import reference
from moesaic.kernels.biased_attention import attend_biased
from moesaic.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from moesaic.kernels.cuda.layout_rows import flat_rows, indexed, rows_of
from moesaic.kernels.delta_rule import delta_rule_in_chunks
from moesaic.kernels.exact_forward import exact_matmul, needs_grad
from moesaic.kernels.interface import AttentionCall, KVCache, LatentCall, Mask, QKNorm, RopeAngles, Routes
from moesaic.kernels.latent_attention import attend_latent as attend_latent_by
from moesaic.kernels.layer_weights import ExpertWeights, NormWeights, RouteRules
from moesaic.kernels.reference import activate as activate
from moesaic.kernels.reference import combine as combine
from moesaic.kernels.reference import compute_experts as compute_experts
from moesaic.kernels.reference import dispatch as dispatch
from moesaic.kernels.reference import embed as embed
from moesaic.kernels.reference import gated as gated
from moesaic.kernels.reference import layer_norm as layer_norm
from moesaic.kernels.reference import mask_for_sdpa
from moesaic.kernels.reference import rotate as rotate
from moesaic.kernels.reference import run_encoder as run_encoder
from moesaic.kernels.reference import run_layers as run_layers
from moesaic.kernels.triton import linear as invariant
from moesaic.kernels.triton import norm as norms
from moesaic.kernels.triton.attention import index_rows as indexing
from moesaic.kernels.triton.attention import latent as absorbing
from moesaic.kernels.triton.attention import paged
from moesaic.kernels.triton.attention import qk_norm_rope as fused
from moesaic.kernels.triton.attention.choose import choose
from moesaic.kernels.triton.attention.paged_rows import Rows, prefill_tile
from moesaic.kernels.triton.attention.qk_norm_rope_cache import qk_norm_rope_into_cache
from moesaic.kernels.triton.experts import gate, router
from moesaic.kernels.triton.experts.layer import experts as triton_experts
from moesaic.kernels.triton.graph_break import eager

HALF = (torch.bfloat16, torch.float16)
CUDNN_MULTIPLE = 256  # sequences of one length, a multiple of this, may go to cuDNN

delta_rule = eager(delta_rule_in_chunks)  # its tensors of lengths would be compiled anew for every batch


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
    if x_TI.dim() != 2 or not x_TI.numel() or needs_grad(x_TI, weight_OI, bias_O):
        return F.linear(x_TI, weight_OI, bias_O)
    return invariant.linear(x_TI, weight_OI, bias_O)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if needs_grad(x_TD, weight_D):
        return reference.rms_norm(x_TD, weight_D, eps)
    return norms.rms_norm(x_TD, weight_D, eps)


def qk_norm_rope(
    qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
) -> tuple[Tensor, Tensor, Tensor]:
    if not len(qkv_TXC):
        return reference.qk_norm_rope(qkv_TXC, kv_heads, norm, rope, rms_norm)
    if needs_grad(qkv_TXC, *(() if norm is None else (norm.q_C, norm.k_C))):
        return fused.qk_norm_rope(qkv_TXC, kv_heads, norm, rope)
    (T, X, C), H = qkv_TXC.shape, qkv_TXC.shape[1] - 2 * kv_heads
    # The kernel that fills a cache, with one that is all one page: a token's position in it is its row.
    row_T = torch.arange(T, dtype=torch.int32, device=qkv_TXC.device)
    first_T, page_11 = torch.zeros_like(row_T), torch.zeros(1, 1, dtype=torch.int32, device=qkv_TXC.device)
    keys, values = qkv_TXC.new_empty(2, 1, T, kv_heads, C)
    table = RopeAngles(rope.cos_TR.contiguous(), rope.sin_TR.contiguous(), rope.interleaved)
    rows = Rows(row_T, first_T, page_11, T, None, read_before_wait=False)
    cache = {"keys": keys, "values": values}
    q_THC = qk_norm_rope_into_cache(qkv_TXC.reshape(T, X * C), norm, table, row_T, rows, cache, H, kv_heads)
    return q_THC, keys[0], values[0]


def router_logits(x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
    if x_TD.dim() != 2 or not len(x_TD):
        return reference.router_logits(x_TD, weight_ED)
    if needs_grad(x_TD, weight_ED):
        # Products of bf16 numbers are exact in float32: nothing is gained by making the numbers longer first.
        exact = x_TD.dtype == weight_ED.dtype == torch.bfloat16
        return eager_router_logits(x_TD, weight_ED) if exact else reference.router_logits(x_TD, weight_ED)
    return router.router_logits(x_TD, weight_ED)


def route(logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None) -> Routes:
    known = router.supports_groups(logits_TE.shape[-1], rules.groups)
    if not len(logits_TE) or chosen_TK is not None or not known:
        return reference.route(logits_TE, correction_E, rules, chosen_TK)
    if needs_grad(logits_TE):
        # The choice has no gradient, and the library's takes three times as long; the chosen ones' weights have.
        return reference.route(logits_TE, correction_E, rules, eager_topk(logits_TE.detach(), correction_E, rules)[0])
    return Routes(*eager_topk(logits_TE, correction_E, rules))


def experts(x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    if weights.activation in gate.KNOWN and routes.weights_TK.dtype == torch.float32:
        return eager_experts(x_TD, *routes, weights)
    return reference.experts(x_TD, routes, weights)


@eager
def eager_router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return exact_matmul(lambda x_TD, weight_ED, _: router.router_logits(x_TD, weight_ED), x_TD, weight_ED, None)


@eager
def eager_topk(logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules) -> tuple[Tensor, Tensor]:
    routes_TK, weights_TK = router.topk(logits_TE.contiguous(), correction_E, router.TopK.by(rules))
    return routes_TK.long(), weights_TK


@eager
def eager_experts(x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights) -> Tensor:
    own = gate.Gate.of(weights.activation, weights.bias_EG)
    return triton_experts(x_TD, routes_TK, weights_TK, weights.gate_up_EGD, weights.down_EDF, gate=own)


def attention(q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
    if mask.sinks_H is not None:  # no kernel here knows them
        return reference.attention(q_THC, k_MNC, v_MNX, mask)
    seen_TM, causal = mask_for_sdpa(q_THC.shape[0], k_MNC.shape[0], mask, q_THC.device)
    out_HTX = F.scaled_dot_product_attention(
        q_THC.transpose(0, 1).unsqueeze(0),
        k_MNC.transpose(0, 1).unsqueeze(0),
        v_MNX.transpose(0, 1).unsqueeze(0),
        attn_mask=seen_TM,
        is_causal=causal,
        scale=mask.scale,
        enable_gqa=q_THC.shape[1] != k_MNC.shape[1],
    )
    return out_HTX.squeeze(0).transpose(0, 1)


@eager
def attend(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
    layout, cache = call.layout, call.cache
    if call.bias is not None:
        return attend_biased(q_THC, k_TNC, v_TNC, call)
    if call.chunked:
        return reference.attend(q_THC, k_TNC, v_TNC, call, attention)
    if cache is None:
        if takes_varlen(q_THC, layout):
            return varlen_attention(q_THC, k_TNC, v_TNC, layout, call)
    elif not needs_grad(q_THC, k_TNC, v_TNC) and not (layout.has_trees and call.window is not None):
        layout.write(cache["keys"], k_TNC)
        layout.write(cache["values"], v_TNC)
        rows = rows_of(layout, prefill_tile(q_THC.shape[1] // k_TNC.shape[1], q_THC.dtype == torch.float32))
        keys, values = cache["keys"], cache["values"]
        return paged.attend(q_THC, keys, values, rows, call.scale, call.window, sinks_H=call.sinks_H)
    return reference.attend(q_THC, k_TNC, v_TNC, call, attention)


def takes_varlen(q_THC: Tensor, layout: Any) -> bool:
    return q_THC.dtype in HALF and q_THC.shape[2] % 8 == 0 and q_THC.shape[2] <= 256 and not layout.has_trees


def varlen_attention(
    q_THC: Tensor,
    k_TNC: Tensor,
    v_TNC: Tensor,
    layout: Any,
    call: AttentionCall,
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Whole sequences (documents) side by side, each attending to itself: one call of the library for all of them. With
    a `forward` that is another's, the gradients are."""
    lengths, scale, window = [span.new for span in layout.spans], call.scale, call.window
    if forward is None and needs_grad(q_THC, k_TNC, v_TNC) and cudnn_takes(lengths, q_THC, call):
        return fixed_length_attention(q_THC, k_TNC, v_TNC, lengths[0], scale)
    out_THC: Tensor = VarlenAttention.apply(
        q_THC, k_TNC, v_TNC, call.sinks_H, layout.starts_S1, max(lengths), scale, window, call.causal, forward
    )
    return out_THC


def cudnn_takes(lengths: list[int], q_THC: Tensor, call: AttentionCall) -> bool:
    """Whether cuDNN, 1.8 times faster than flash attention on a Hopper GPU, can take these sequences: it has no working
    form for uneven ones, plans anew for every length, and does not promise to repeat its gradients' bits."""
    return (
        len(set(lengths)) == 1
        and call.window is None
        and call.causal
        and call.sinks_H is None
        and lengths[0] % CUDNN_MULTIPLE == 0
        and q_THC.shape[2] in (64, 128)
        and torch.cuda.get_device_capability(q_THC.device)[0] >= 9
        and not torch.are_deterministic_algorithms_enabled()
    )


def fixed_length_attention(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, length: int, scale: float) -> Tensor:
    q_SHTC, k_SNTC, v_SNTC = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_THC, k_TNC, v_TNC))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out_SHTC = F.scaled_dot_product_attention(q_SHTC, k_SNTC, v_SNTC, is_causal=True, scale=scale, enable_gqa=True)
    return out_SHTC.transpose(1, 2).flatten(0, 1)


class VarlenAttention(torch.autograd.Function):
    """Flash attention. A head's sink makes the sum of its weights larger, and nothing else: with that sum the library's
    gradients of queries, keys and values are right as they are. They need what a forward found, whoever's it was: with
    another's nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TNC: Tensor,
        v_TNC: Tensor,
        sinks_H: Tensor | None,
        starts_S1: Tensor,
        max_length: int,
        scale: float,
        window: int | None,
        causal: bool,
        forward: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        left = -1 if window is None else window - 1
        right = 0 if causal else left
        if forward is not None:
            out_THC, sums = forward(q_THC, k_TNC, v_TNC, sinks_H)
            state, unused = (torch.empty(size, dtype=torch.uint64, device=q_THC.device) for size in ((2,), ()))
        else:
            out_THC, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
                q_THC, k_TNC, v_TNC, starts_S1, starts_S1, max_length, max_length, 0.0, causal, False, scale=scale,
                window_size_left=left, window_size_right=right,
            )  # fmt: skip
            if sinks_H is not None:
                plain, sums = sums, torch.logaddexp(sums, sinks_H.float()[:, None])  # logarithms, (H, T)
                out_THC = (out_THC * (plain - sums).exp().T[:, :, None]).to(out_THC.dtype)
        ctx.save_for_backward(q_THC, k_TNC, v_TNC, sinks_H, out_THC, sums, starts_S1, state, unused)
        ctx.facts = (max_length, scale, left, right, causal)
        return out_THC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THC, k_TNC, v_TNC, sinks_H, out_THC, sums, starts_S1, state, unused = ctx.saved_tensors
        max_length, scale, left, right, causal = ctx.facts
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q_THC, k_TNC, v_TNC, out_THC, sums, starts_S1, starts_S1, max_length, max_length,
            0.0, causal, state, unused, scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        d_sinks = None
        if ctx.needs_input_grad[3]:
            lost_HT = (sinks_H.float()[:, None] - sums).exp()  # the share of its weights that a sink has
            d_sinks = -(lost_HT * (grads[0].float() * out_THC).sum(-1).T).sum(1).to(sinks_H.dtype)
        return d_q, d_k, d_v, d_sinks, None, None, None, None, None, None


@eager
def index_rows(q_THC: Tensor | None, k_TC: Tensor, norm: NormWeights, rope: RopeAngles) -> tuple[Tensor | None, Tensor]:
    if not len(k_TC) or needs_grad(q_THC, k_TC, norm.weight, norm.bias):
        return reference.index_rows(q_THC, k_TC, norm, rope)
    # As above: a cache that is all one page.
    row_T = torch.arange(len(k_TC), dtype=torch.int32, device=k_TC.device)
    page_11 = torch.zeros(1, 1, dtype=torch.int32, device=k_TC.device)
    rows = Rows(row_T, torch.zeros_like(row_T), page_11, len(k_TC), None, read_before_wait=False)
    table = RopeAngles(rope.cos_TR.contiguous(), rope.sin_TR.contiguous(), rope.interleaved)
    keys = k_TC.new_empty(1, *k_TC.shape)
    q_TX = None if q_THC is None else q_THC.flatten(1).contiguous()
    return indexing.index_rows(q_TX, k_TC.contiguous(), norm, table, row_T, rows, keys), keys[0]


@eager
def select_tokens(
    q_THC: Tensor, k_TC: Tensor, weights_TH: Tensor, layout: Any, cache: KVCache | None, topk: int
) -> list[Tensor | None]:
    if not len(q_THC) or needs_grad(q_THC, k_TC, weights_TH):
        return reference.select_tokens(q_THC, k_TC, weights_TH, layout, cache, topk)
    rows = indexed(flat_rows(layout, 1, 1) if cache is None else rows_of(layout, 1, 1), layout)
    keys = k_TC.contiguous().unsqueeze(1) if cache is None else cache["index"]
    chosen_TK = choose(q_THC.contiguous(), weights_TH.contiguous(), keys, rows, topk, 1.0, places=True).slots_TK
    known_TK = torch.arange(topk, device=chosen_TK.device) <= rows.positions_T[:, None]
    chosen_TK = torch.where(known_TK, chosen_TK, -1)
    return [chosen_TK[span.start : span.stop] if span.total > topk and span.new else None for span in layout.spans]


def slots_of(selected: list[Tensor | None], layout: Any, rows: Rows, page_size: int) -> Tensor:
    """Where in a cache what is attended to lies: for each row as many as there are, no more than (T, K)."""
    # A sequence without a new row has no choice either, though it may be longer than what others choose.
    whole = [span.total for span in layout.spans if span.new and selected[span.number] is None]
    width = max([*whole, *(one.shape[1] for one in selected if one is not None)])
    places_TK = torch.arange(width, device=layout.device).expand(layout.tokens, -1).clone()
    for span in layout.spans:
        if (chosen_TK := selected[span.number]) is not None:
            places_TK[span.start : span.stop, : chosen_TK.shape[1]] = chosen_TK.clamp(min=0)
    pages_TP = rows.page_table_SP[rows.sequences_T.long()].long()
    page_TK = pages_TP.gather(1, (places_TK // page_size).clamp(max=pages_TP.shape[1] - 1))
    return (page_TK * page_size + places_TK % page_size).int()


def attend_latent(call: LatentCall) -> Tensor:
    """Without expanding what is cached, where every token looks at all before it."""
    if (out_THV := eager_attend_latent(call)) is not None:
        return out_THV
    return attend_latent_by(call, rms_norm, rotate, attention)


def in_latent_space(call: LatentCall) -> bool:
    """Whether the kernels take a call: it says nothing of trees, gradients and the cache."""
    return isinstance(call.up, Tensor) and bool(len(call.q_THC))


@eager
def eager_attend_latent(call: LatentCall) -> Tensor | None:
    layout, cache = call.attention.layout, call.attention.cache
    if not in_latent_space(call) or cache is None or layout.has_trees:
        return None
    if needs_grad(call.q_THC, call.kv_TX, call.norm_K, call.up):
        return None
    rows = rows_of(layout, *latent_tokens(call))
    return absorbed(call, call.q_THC, call.kv_TX, call.norm_K, call.up, rows, cache["latent"])


def latent_tokens(call: LatentCall) -> tuple[int, int]:
    """Tokens that attend together in prefill, and in decode."""
    if call.selected is not None:  # each to its own
        return 1, 1
    return paged.latent_tile(call.q_THC.shape[1], call.q_THC.dtype == torch.float32)[1], 1


def absorbed(
    call: LatentCall, q_THC: Tensor, kv_TX: Tensor, norm_K: Tensor, up: Tensor, rows: Rows, latents: Tensor
) -> Tensor:
    """The tensors of a call as they are given here: some with gradients of their own."""
    up_HXK = up.unflatten(0, (q_THC.shape[1], -1))
    keys_HPK, values_HVK = up_HXK.split([call.plain_size, up_HXK.shape[1] - call.plain_size], dim=1)
    row_T = torch.arange(len(q_THC), dtype=torch.int32, device=q_THC.device)
    table = RopeAngles(call.rope.cos_TR.contiguous(), call.rope.sin_TR.contiguous(), call.rope.interleaved)
    norm = NormWeights(norm_K, call.eps)
    q_THX = absorbing.queries_into_cache(
        q_THC.contiguous(), kv_TX.contiguous(), keys_HPK, norm, table, row_T, rows, latents
    )
    rope_size = kv_TX.shape[1] - len(norm_K)
    chosen_TK = None
    if call.selected is not None:
        chosen_TK = slots_of(call.selected, call.attention.layout, rows, latents.shape[1])
    scale = call.attention.scale
    out_THK = paged.attend(q_THX, latents, latents, rows, scale, rope_size=rope_size, chosen_TK=chosen_TK)
    return absorbing.matmul_by_head(out_THK, values_HVK, q_THC.new_empty(*q_THC.shape[:2], values_HVK.shape[1]))
