"""Grouped-query and latent attention by Mesh-Attention: what travels for keys and values, and in which tiles."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moesaic.kernels.interface import AttentionCall, Kernels, LatentCall, RopeAngles
from moesaic.parallel.context.block_attention import Rule
from moesaic.parallel.context.mesh import Mesh
from moesaic.parallel.context.mesh_tiles import RowBytes, Tile, best_tile
from moesaic.parallel.context.ulysses import QKV, rotated_rows
from moesaic.parallel.rows import RowGroup, RowSplit


def attend_by_tiles(qkv: QKV, call: AttentionCall, split: RowSplit, ranks: RowGroup, tile: Tile | None) -> Tensor:
    q_THC, k_TNC, v_TNC = qkv
    carried_TNX = torch.cat([k_TNC, v_TNC], dim=2)
    row = row_bytes(q_THC, carried_TNX, v_TNC.shape[2])
    rule, open_ = Rule(call.scale, call.window), partial(_split_keys, size=k_TNC.shape[2])
    return Mesh(split, ranks, tile or best_tile(ranks.size, row), rule, row, open_).attend(q_THC, carried_TNX)


def attend_latent_by_tiles(
    plain: Kernels, call: LatentCall, rope: RopeAngles, split: RowSplit, ranks: RowGroup, tile: Tile | None
) -> Tensor:
    """Latents travel, and every rank expands those that come. `rope` is of the rows that are here."""
    size, heads = call.plain_size, call.q_THC.shape[1]
    q_THC, latent_TX = rotated_rows(plain, call, rope)
    row = row_bytes(q_THC, latent_TX, call.up.shape[0] // heads - size)
    open_ = partial(_expand, heads=heads, size=size)
    mesh = Mesh(split, ranks, tile or best_tile(ranks.size, row), Rule(call.attention.scale), row, open_)
    return mesh.attend(q_THC, latent_TX, call.up)


def row_bytes(q_THC: Tensor, carried_T: Tensor, value_size: int) -> RowBytes:
    heads, width = q_THC.shape[1], q_THC.element_size()
    carried = carried_T.shape[1:].numel()
    return RowBytes(heads * q_THC.shape[2] * width, carried * width, heads * value_size * width, heads * 4)


def _split_keys(carried_MNX: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return carried_MNX[..., :size], carried_MNX[..., size:]


def _expand(latent_MX: Tensor, up: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    rank = up.shape[1]
    kv_MHX = torch.nn.functional.linear(latent_MX[:, :rank], up).unflatten(-1, (heads, -1))
    key_M1C = latent_MX[:, None, rank:].expand(-1, heads, -1)
    return torch.cat([kv_MHX[..., :size], key_M1C], dim=2), kv_MHX[..., size:]
