"""Latent attention (MLA: DeepSeek-V2 and later) over a flat batch, one sequence at a time, in plain PyTorch.

What is cached is a latent for each token and one rotated key that all heads share. A latent is expanded to every head's
key and value, or the projections are absorbed into the query and the output, so that all heads attend to the latents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.kernels.interface import LatentCall, Mask

FOLDED = 256  # queries at a time that are folded for attention to chosen latents


def attend_latent(
    call: LatentCall,
    rms_norm: Callable[..., Tensor],
    rotate: Callable[..., Tensor],
    attention: Callable[..., Tensor],
    gathers: bool = False,
) -> Tensor:
    """`gathers` says that `attention` fetches chosen tokens only."""
    layout, cache = call.attention.layout, call.attention.cache
    q_THC, latent_TX = normed_and_rotated(call, rms_norm, rotate)
    if cache is not None:
        layout.write(cache["latent"], latent_TX)

    pieces = []
    for span, q, latent_MX in layout.per_sequence(q_THC, latent_TX):
        # Where the cache rounds, all see what was rounded.
        in_cache = cache is not None and (span.cached > 0 or cache["latent"].dtype != q.dtype)
        if cache is not None and in_cache:
            latent_MX = layout.read(cache["latent"], span).to(q)
        chosen_TK = call.selected[span.number] if call.selected is not None else None
        keep_TM, _ = layout.mask(span, None)
        if chosen_TK is not None and span.new == 1:  # one query: drop what it will not look at
            latent_MX, chosen_TK = latent_MX[chosen_TK[0].long()], None
        mask = Mask(call.attention.scale, None, keep_TM, chosen_TK=chosen_TK)
        # Of chosen tokens a head's keys and values would be fetched for that head alone, a latent is for all.
        pays = (gathers and chosen_TK is not None) or (in_cache and _absorbing_pays(call, span.new))
        absorb = call.absorb and isinstance(call.up, Tensor) and pays
        if absorb and chosen_TK is not None:  # a query folded is several times as wide
            for rows, chosen in zip(q.split(FOLDED), chosen_TK.split(FOLDED), strict=True):
                pieces.append(_absorbed(call, rows, latent_MX, mask._replace(chosen_TK=chosen), attention))
            continue
        form = _absorbed if absorb else _expanded
        pieces.append(form(call, q, latent_MX, mask, attention))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def normed_and_rotated(
    call: LatentCall, rms_norm: Callable[..., Tensor], rotate: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries as they attend, and what is cached of every token."""
    rank, size = len(call.norm_K), call.q_THC.shape[2]
    plain_THC, rotated_THC = call.q_THC.split([call.plain_size, size - call.plain_size], dim=-1)
    q_THC = torch.cat([plain_THC, rotate(rotated_THC, call.rope)], dim=-1)
    latent_TK, key_TC = call.kv_TX.split([rank, call.kv_TX.shape[1] - rank], dim=-1)
    key_T1C = rotate(key_TC.unsqueeze(1), call.rope)
    return q_THC, torch.cat([rms_norm(latent_TK, call.norm_K, call.eps), key_T1C.squeeze(1)], dim=-1)


def _absorbing_pays(call: LatentCall, new: int) -> bool:
    """Attention in latent space costs more per query-key pair, but spares expanding every cached latent."""
    rank, heads, key_size = len(call.norm_K), call.q_THC.shape[1], call.q_THC.shape[2]
    value_size = call.up.shape[0] // heads - call.plain_size
    per_pair = 2 * rank + (key_size - call.plain_size) - key_size - value_size
    return bool(new * per_pair < rank * (call.plain_size + value_size))


def _expanded(
    call: LatentCall, q_THC: Tensor, latent_MX: Tensor, mask: Mask, attention: Callable[..., Tensor]
) -> Tensor:
    k_MHC, v_MHX = expanded(call, latent_MX)
    return attention(q_THC, k_MHC, v_MHX, mask)


def expanded(call: LatentCall, latent_MX: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's key and value of each latent."""
    heads, rank = call.q_THC.shape[1], len(call.norm_K)
    latent_MK, key_MC = latent_MX.split([rank, latent_MX.shape[1] - rank], dim=-1)
    kv_MHX = call.expand(latent_MK).unflatten(-1, (heads, -1))
    plain_MHC, v_MHX = kv_MHX.split([call.plain_size, kv_MHX.shape[2] - call.plain_size], dim=-1)
    return torch.cat([plain_MHC, key_MC.unsqueeze(1).expand(-1, heads, -1)], dim=-1), v_MHX


def _absorbed(
    call: LatentCall, q_THC: Tensor, latent_MX: Tensor, mask: Mask, attention: Callable[..., Tensor]
) -> Tensor:
    """Fold the key projection into the query and the value projection into the output: all heads share one key."""
    heads, rank, size = q_THC.shape[1], len(call.norm_K), call.plain_size
    up_HXK = call.up.unflatten(0, (heads, -1))
    plain_THC, rotated_THC = q_THC.split([size, q_THC.shape[2] - size], dim=-1)
    folded_THK = torch.bmm(plain_THC.transpose(0, 1), up_HXK[:, :size]).transpose(0, 1)
    q_THX = torch.cat([folded_THK, rotated_THC], dim=-1)
    keys_M1X = latent_MX.unsqueeze(1)
    # The latent is key and value at once; its rotary part rides along as a value nobody reads.
    out_THK = attention(q_THX, keys_M1X, keys_M1X, mask)[..., :rank]
    return torch.bmm(out_THK.transpose(0, 1), up_HXK[:, size:].transpose(1, 2)).transpose(0, 1)
