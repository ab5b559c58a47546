"""Quantized keys and values: codes of 8, 4 or 2 bits with a scale and a minimum each.

Tokens are quantized in blocks of `group`, to the nearest codes, or keys for the least error under the last queries. By
channel (KIVI, MiniKV's keys), each channel of a block has one scale over all its tokens; by token, every `channels`
numbers of a token share one. A block fills whole rows of the cache: a row is one head's key or value of one token, and
here only bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moesaic.serve.core.kv.rounding import codes_for_queries

By = Literal["channel", "token"]


@dataclass(frozen=True)
class Encoding:
    bits: int
    group: int = 32  # tokens of a block
    channels: int = 32  # numbers of one token that share a scale
    recent: int = 64  # newest tokens, which are not quantized
    keys: By = "channel"
    values: By = "token"
    first: int = 0  # oldest tokens, which are not quantized either: all others attend to them
    # Last tokens whose queries keys are quantized for (`serve/core/kv/rounding.py`); 0: to the nearest code.
    queries: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 8, 4 or 2, not {self.bits}")
        if self.group < 8 or self.group % 8:
            raise ValueError("group must be a multiple of 8")
        if self.channels < 1 or self.recent < 1:
            raise ValueError("channels and recent must be at least 1")
        if self.first < 0 or self.queries < 0:
            raise ValueError("first and queries must not be negative")

    def rows(self, size: int, row_bytes: int) -> int:
        """How many rows of the cache a block takes; keys and values take equally many."""
        per_scale = {"channel": size, "token": self.group * -(-size // self.width(size))}
        scales = max(per_scale[self.keys], per_scale[self.values])
        return -(-(self.group * size * self.bits // 8 + 4 * scales) // row_bytes)

    def width(self, size: int) -> int:
        """`channels` numbers share a scale, if they divide a head; else the whole head does."""
        return self.channels if size % self.channels == 0 else size

    def encoded_tokens(self, tokens: int) -> int:
        """How many of a head's tokens, the oldest but the first, are quantized."""
        return max(0, tokens - self.recent - self.first) // self.group * self.group

    def encode(self, x_NMC: Tensor, by: By, block_bytes: int, queries_NQC: Tensor | None = None) -> Tensor:
        """Quantize whole blocks of tokens to bytes (N, blocks, block_bytes)."""
        grouped = self._grouped(x_NMC.float(), by)
        axis = -2 if by == "channel" else -1
        least, largest = grouped.aminmax(dim=axis, keepdim=True)
        # Rounded as they are stored, so that the codes compensate for it.
        least = least.to(torch.float16)
        scale = ((largest - least.float()) / (2**self.bits - 1)).clamp(min=0).to(torch.float16)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        if queries_NQC is None:
            codes = ((grouped - least.float()) / scale.float()).round_().clamp_(0, 2**self.bits - 1)
        else:
            scale_NMC, least_NMC = (part.float().expand_as(grouped).reshape(x_NMC.shape) for part in (scale, least))
            codes = codes_for_queries(x_NMC.float(), scale_NMC, least_NMC, 2**self.bits - 1, queries_NQC)
            codes = codes.reshape(grouped.shape)
        codes = codes.to(torch.uint8)
        heads, blocks = codes.shape[:2]
        packed = codes.reshape(heads, blocks, -1, 8 // self.bits)
        packed = (packed << self._shifts(x_NMC.device)).sum(-1, dtype=torch.uint8)
        parts = [packed, *(part.reshape(heads, blocks, -1).view(torch.uint8) for part in (scale, least))]
        filled = torch.zeros(heads, blocks, block_bytes, dtype=torch.uint8, device=x_NMC.device)
        joined = torch.cat(parts, dim=-1)
        filled[..., : joined.shape[-1]] = joined
        return filled

    def decode(self, bytes_NBX: Tensor, by: By, size: int) -> Tensor:
        """Dequantize: (N, tokens, C) float32."""
        heads, blocks = bytes_NBX.shape[:2]
        numbers = self.group * size
        packed = numbers * self.bits // 8
        scales = size if by == "channel" else numbers // self.width(size)
        codes = bytes_NBX[..., :packed]
        if self.bits < 8:
            codes = (codes.unsqueeze(-1) >> self._shifts(codes.device)) & (2**self.bits - 1)
        ends = bytes_NBX[..., packed : packed + 4 * scales].contiguous().view(torch.float16).float()
        scale, least = ends.split(scales, dim=-1)
        shape = (heads, blocks, 1, size) if by == "channel" else (heads, blocks, scales, 1)
        inner = (self.group, size) if by == "channel" else (scales, -1)
        decoded = torch.addcmul(
            least.view(shape), codes.reshape(heads, blocks, *inner).to(torch.float32), scale.view(shape)
        )
        return decoded.reshape(heads, blocks * self.group, size)

    def _grouped(self, x_NMC: Tensor, by: By) -> Tensor:
        heads, tokens, size = x_NMC.shape
        if by == "channel":
            return x_NMC.view(heads, tokens // self.group, self.group, size)
        return x_NMC.reshape(heads, tokens // self.group, -1, self.width(size))

    def _shifts(self, device: torch.device) -> Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)
