"""Attention over rows that lie on several ranks, by Ulysses: a rank attends with some heads over all rows.

The kernels that run one process's attention run here, on fewer heads: where a head's result does not depend on the
other heads, the bits are one process's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moesaic.kernels.interface import AttentionCall, Kernels, LatentCall, Mask, RopeAngles
from moesaic.parallel.context.heads import HeadShare, divide_heads, to_heads, to_rows
from moesaic.parallel.rows import RowGroup, RowSplit, gather_rows

QKV = tuple[Tensor, Tensor, Tensor]  # (T, H, C), (T, N, C), (T, N, X)


def attend_by_heads(plain: Kernels, qkv: QKV, call: AttentionCall, split: RowSplit, ranks: RowGroup) -> Tensor:
    q_THC, k_TNC, v_TNC = qkv
    shares = divide_heads(q_THC.shape[1], k_TNC.shape[1], ranks.size)
    mine, read = shares[ranks.rank], [share.kv for share in shares]
    q, k, v = to_heads([q_THC, k_TNC, v_TNC], [_queries(shares), read, read], split, ranks)
    if mine.kv_of is not None:
        chosen = torch.tensor(mine.kv_of, device=k.device)
        k, v = k.index_select(1, chosen), v.index_select(1, chosen)
    out_THC = plain.attend(q, k, v, call) if mine.heads else q
    return to_rows(out_THC, shares, split, ranks)


def attend_latent_by_heads(
    plain: Kernels, call: LatentCall, rope: RopeAngles, split: RowSplit, ranks: RowGroup
) -> Tensor:
    """All heads share the latents: they go to every rank, which expands them for its heads. Among so many ranks that
    the latents of all are more than the keys and values of a rank's heads, those travel. `rope` is of the rows here."""
    if isinstance(call.up, Tensor) and sent_latents(call, ranks.size) <= sent_expanded(call, ranks.size):
        return _latents_everywhere(plain, call, split, ranks)
    return _expanded_here(plain, call, rope, split, ranks)


def sent_latents(call: LatentCall, ranks: int) -> float:
    """Numbers a row sends to other ranks as a latent."""
    return (ranks - 1) * call.kv_TX.shape[1]


def sent_expanded(call: LatentCall, ranks: int) -> float:
    """And as keys and values of all heads."""
    heads, size = call.q_THC.shape[1:]
    return (ranks - 1) / ranks * (heads * (size - call.plain_size) + call.up.shape[0])


def _latents_everywhere(plain: Kernels, call: LatentCall, split: RowSplit, ranks: RowGroup) -> Tensor:
    heads, tokens = call.q_THC.shape[1], split.tokens
    shares = divide_heads(heads, heads, ranks.size)
    mine = shares[ranks.rank]
    (q_THC,) = to_heads([call.q_THC], [_queries(shares)], split, ranks)
    kv_TX = gather_rows(call.kv_TX, split, ranks)
    up = call.up.unflatten(0, (heads, -1))[mine.first : mine.last].flatten(0, 1)
    expand = partial(_linear, plain, up, getattr(getattr(call.expand, "func", None), "site", ""))
    value_size = call.up.shape[0] // heads - call.plain_size
    if mine.heads:
        out_THV = plain.attend_latent(call._replace(q_THC=q_THC, kv_TX=kv_TX, up=up, expand=expand))
    else:  # nothing to compute, but what came must take part in the backward pass
        latent_TK = plain.rms_norm(kv_TX[:, : len(call.norm_K)], call.norm_K, call.eps)
        nothing = [part.reshape(tokens, 0, value_size) for part in (q_THC, expand(latent_TK))]
        out_THV = torch.cat(nothing, 1)
    return to_rows(out_THV, shares, split, ranks)


def _linear(plain: Kernels, weight_OI: Tensor, site: str, x_TI: Tensor) -> Tensor:
    return plain.linear(x_TI, weight_OI, None, site)


def _expanded_here(plain: Kernels, call: LatentCall, rope: RopeAngles, split: RowSplit, ranks: RowGroup) -> Tensor:
    q_THC, latent_TX = rotated_rows(plain, call, rope)
    k_THC, v_THV = expanded(call, latent_TX)
    heads = q_THC.shape[1]
    shares = divide_heads(heads, heads, ranks.size)
    columns = _queries(shares)
    q, k, v = to_heads([q_THC, k_THC, v_THV], [columns] * 3, split, ranks)
    if shares[ranks.rank].heads:
        layout, mask = call.attention.layout, Mask(call.attention.scale)
        pieces = [plain.attention(q_THC, k_THC, v_THV, mask) for _, q_THC, k_THC, v_THV in layout.per_sequence(q, k, v)]
        out_THV = torch.cat(pieces)
    else:
        out_THV = v
    return to_rows(out_THV, shares, split, ranks)


def rotated_rows(plain: Kernels, call: LatentCall, rope: RopeAngles) -> tuple[Tensor, Tensor]:
    """Queries of the rows that are here, and their latents with the rotated key, normed: as they are cached."""
    size, rank = call.plain_size, len(call.norm_K)
    plain_THC, rotated_THC = call.q_THC.split([size, call.q_THC.shape[2] - size], dim=2)
    q_THC = torch.cat([plain_THC, plain.rotate(rotated_THC, rope)], dim=2)
    latent_TK, key_TC = call.kv_TX.split([rank, call.kv_TX.shape[1] - rank], dim=1)
    key_TC = plain.rotate(key_TC.unsqueeze(1), rope).squeeze(1)
    return q_THC, torch.cat([plain.rms_norm(latent_TK, call.norm_K, call.eps), key_TC], dim=1)


def expanded(call: LatentCall, latent_MX: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, as if they were no latent's."""
    rank, heads, size = len(call.norm_K), call.q_THC.shape[1], call.plain_size
    kv_MHX = call.expand(latent_MX[:, :rank]).unflatten(-1, (heads, -1))
    key_M1C = latent_MX[:, None, rank:].expand(-1, heads, -1)
    return torch.cat([kv_MHX[..., :size], key_M1C], dim=2), kv_MHX[..., size:]


def _queries(shares: tuple[HeadShare, ...]) -> list[tuple[int, ...]]:
    return [tuple(range(share.first, share.last)) for share in shares]
