"""Learn on a GPU with the very bits the engine computes: its kernels forward, the library's gradients back.

The trainer's log-probability of a token is then to the bit what the engine recorded when it sampled it. This holds for
what the engine runs as graphed steps (grouped-query attention); latent attention is the library's here as there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import Batch, RouteRules, cuda, reference
from moesaic.kernels.cuda import attention as attention
from moesaic.kernels.cuda import experts as experts
from moesaic.kernels.cuda import gated as gated
from moesaic.kernels.cuda import rotate as rotate
from moesaic.kernels.triton import paged_attention
from moesaic.kernels.triton.paged_rows import Rows, tiles_of
from moesaic.kernels.twice import learning, product, twice


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return product(cuda.linear, x_TI, weight_OI, bias_O)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out_TD: Tensor = twice(partial(cuda.rms_norm, eps=eps), partial(reference.rms_norm, eps=eps), x_TD, weight_D)
    return out_TD


def heads(
    qkv_TXC: Tensor,
    kv_heads: int,
    q_weight_C: Tensor | None,
    k_weight_C: Tensor | None,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    def run(kernels: Any, qkv_TXC: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_weight_C, k_weight_C = weights or (None, None)
        found: tuple[Tensor, Tensor, Tensor] = kernels.heads(
            qkv_TXC, kv_heads, q_weight_C, k_weight_C, eps, cos_TR, sin_TR, interleaved
        )
        return found

    weights = () if q_weight_C is None or k_weight_C is None else (q_weight_C, k_weight_C)
    q_THC, k_TNC, v_TNC = twice(partial(run, cuda), partial(run, reference), qkv_TXC, *weights)
    return q_THC, k_TNC, v_TNC


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    logits_TE: Tensor = twice(cuda.router_logits, reference.router_logits, x_TD, weight_ED)
    return logits_TE


def route(
    logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        routes_TK, weights_TK = cuda.route(logits_TE, correction_E, rules, chosen_TK)
    if learning(logits_TE):
        weights_TK = twice(
            lambda _: weights_TK, lambda same_TE: reference.route(same_TE, None, rules, routes_TK)[1], logits_TE
        )
    return routes_TK, weights_TK


@torch.compiler.disable
def attend(
    q_THC: Tensor,
    k_TNC: Tensor,
    v_TNC: Tensor,
    layout: Batch,
    slabs: dict[str, Tensor] | None,
    scale: float,
    window: int | None = None,
) -> Tensor:
    if slabs is not None or layout.branches or not len(q_THC):
        return cuda.attend(q_THC, k_TNC, v_TNC, layout, slabs, scale, window)

    def exact(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor) -> Tensor:
        rows = flat_rows(layout, q_THC.shape[1] // k_TNC.shape[1], q_THC.dtype == torch.float32)
        keys, values = k_TNC.contiguous().unsqueeze(1), v_TNC.contiguous().unsqueeze(1)
        return paged_attention.attend(q_THC, keys, values, rows, scale, window)

    def plain(q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor) -> Tensor:
        return cuda.attend(q_THC, k_TNC, v_TNC, layout, None, scale, window)

    out_THC: Tensor = twice(exact, plain, q_THC, k_TNC, v_TNC)
    return out_THC


def flat_rows(layout: Any, group: int, wide: bool) -> Rows:
    """Whole sequences side by side as a cache with pages of one token, each where its row is. Made once a forward."""
    known: Rows | None = vars(layout).get("flat_rows")
    if known is None:
        spans, device = layout.spans, layout.device
        whole = partial(torch.tensor, dtype=torch.int32, device=device)
        first_S, length_S = whole([span.start for span in spans]), whole([span.new for span in spans])
        longest = max(span.new for span in spans)
        sequence_T = torch.arange(len(spans), dtype=torch.int32, device=device).repeat_interleave(length_S)
        row_T = torch.arange(layout.tokens, dtype=torch.int32, device=device)
        few, few_tokens, many, many_tokens = tiles_of([(span.start, span.new) for span in spans], group, wide)
        known = vars(layout)["flat_rows"] = Rows(
            places_T=row_T - first_S[sequence_T],
            sequences_T=sequence_T,
            table_SP=first_S[:, None] + torch.arange(longest, dtype=torch.int32, device=device),
            longest=longest,
            few_X2=whole(few) if few else None,
            few_tokens=few_tokens,
            many_X2=whole(many) if many else None,
            many_tokens=many_tokens,
            early=False,
        )
    return known
