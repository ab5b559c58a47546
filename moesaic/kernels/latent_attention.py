"""Latent attention (MLA: DeepSeek-V2 and later) over a flat batch, one sequence at a time, in plain PyTorch.

What is cached is a latent for each token and one rotated key that all heads share. A latent is expanded to every head's
key and value, or the projections are absorbed into the query and the output, so that all heads attend to the latents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.kernels.interface import LatentCall, Mask


def attend_latent(
    call: LatentCall,
    rms_norm: Callable[..., Tensor],
    rotate: Callable[..., Tensor],
    attention: Callable[..., Tensor],
) -> Tensor:
    layout, cache, rank = call.attention.layout, call.attention.cache, len(call.norm_K)
    size = call.q_THC.shape[2]
    plain_THC, rotated_THC = call.q_THC.split([call.plain_size, size - call.plain_size], dim=-1)
    q_THC = torch.cat([plain_THC, rotate(rotated_THC, call.rope)], dim=-1)
    latent_TK, key_TC = call.kv_TX.split([rank, call.kv_TX.shape[1] - rank], dim=-1)
    key_T1C = rotate(key_TC.unsqueeze(1), call.rope)
    latent_TX = torch.cat([rms_norm(latent_TK, call.norm_K, call.eps), key_T1C.squeeze(1)], dim=-1)
    if cache is not None:
        layout.write(cache["latent"], latent_TX)

    pieces = []
    for span, q, latent_MX in layout.per_sequence(q_THC, latent_TX):
        # Where the cache rounds, all see what was rounded.
        in_cache = cache is not None and (span.cached > 0 or cache["latent"].dtype != q.dtype)
        if cache is not None and in_cache:
            latent_MX = layout.read(cache["latent"], span).to(q)
        keep_TM = call.selected[span.number] if call.selected is not None else None
        tree_TM, _ = layout.mask(span, None)
        if tree_TM is not None:
            keep_TM = tree_TM if keep_TM is None else keep_TM & tree_TM
        if keep_TM is not None and span.new == 1:  # one query: drop what it will not look at
            chosen = keep_TM[0].nonzero().squeeze(1)
            latent_MX, keep_TM = latent_MX[chosen], None
        absorb = call.absorb and in_cache and isinstance(call.up, Tensor) and _absorbing_pays(call, span.new)
        form = _absorbed if absorb else _expanded
        pieces.append(form(call, q, latent_MX, keep_TM, attention))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _absorbing_pays(call: LatentCall, new: int) -> bool:
    """Attention in latent space costs more per query-key pair, but spares expanding every cached latent."""
    rank, heads, key_size = len(call.norm_K), call.q_THC.shape[1], call.q_THC.shape[2]
    value_size = call.up.shape[0] // heads - call.plain_size
    per_pair = 2 * rank + (key_size - call.plain_size) - key_size - value_size
    return bool(new * per_pair < rank * (call.plain_size + value_size))


def _expanded(
    call: LatentCall, q_THC: Tensor, latent_MX: Tensor, keep_TM: Tensor | None, attention: Callable[..., Tensor]
) -> Tensor:
    heads, rank = q_THC.shape[1], len(call.norm_K)
    latent_MK, key_MC = latent_MX.split([rank, latent_MX.shape[1] - rank], dim=-1)
    kv_MHX = call.expand(latent_MK).unflatten(-1, (heads, -1))
    plain_MHC, v_MHX = kv_MHX.split([call.plain_size, kv_MHX.shape[2] - call.plain_size], dim=-1)
    k_MHC = torch.cat([plain_MHC, key_MC.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
    return attention(q_THC, k_MHC, v_MHX, Mask(call.attention.scale, None, keep_TM))


def _absorbed(
    call: LatentCall, q_THC: Tensor, latent_MX: Tensor, keep_TM: Tensor | None, attention: Callable[..., Tensor]
) -> Tensor:
    """Fold the key projection into the query and the value projection into the output: all heads share one key."""
    heads, rank, size = q_THC.shape[1], len(call.norm_K), call.plain_size
    up_HXK = call.up.unflatten(0, (heads, -1))
    plain_THC, rotated_THC = q_THC.split([size, q_THC.shape[2] - size], dim=-1)
    folded_THK = torch.bmm(plain_THC.transpose(0, 1), up_HXK[:, :size]).transpose(0, 1)
    q_THX = torch.cat([folded_THK, rotated_THC], dim=-1)
    keys_M1X = latent_MX.unsqueeze(1)
    # The latent is key and value at once; its rotary part rides along as a value nobody reads.
    out_THK = attention(q_THX, keys_M1X, keys_M1X, Mask(call.attention.scale, None, keep_TM))[..., :rank]
    return torch.bmm(out_THK.transpose(0, 1), up_HXK[:, size:].transpose(1, 2)).transpose(0, 1)
