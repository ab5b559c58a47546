"""Where the tokens of a flat batch stand in a paged cache, and how they are cut into tiles for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from moesaic.kernels.triton.attention.prompt_rows import Prompts

MAX_DECODE_TOKENS = 8  # up to this many new tokens of a sequence, the splits of its keys run side by side


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a flat batch stand, on the device; the host knows `max_length` and the tile sizes only.

    A tile is (first row, how many rows) of one sequence: decode tiles have at most `decode_tokens` rows, prefill tiles
    any number.
    """

    positions_T: torch.Tensor  # int32: how many tokens of its sequence come before this one; -1 for a row that is none
    sequences_T: torch.Tensor  # int32
    page_table_SP: torch.Tensor  # int32: each sequence's pages
    max_length: int  # no position is as large as this
    decode_X2: torch.Tensor | None  # int32
    decode_tokens: int = 1
    prefill_X2: torch.Tensor | None = None
    prefill_tokens: int = 0
    trees_TM: torch.Tensor | None = None  # int8: whether a token sees the m-th new token of its sequence
    cached_S: torch.Tensor | None = None  # int32: with trees, how many tokens of each sequence are no draft tokens
    adapters_T: torch.Tensor | None = None  # int32: the number of each row's LoRA adapter, 0 for none
    prompts: Prompts | None = None  # rows that attend to expanded latents, and are in no tile
    kinds_T: torch.Tensor | None = None  # int32: what a row attends to, as `prompt_rows` says; None: all are in tiles
    choosing: bool = False  # whether there are rows of prompts that attend to what an indexer chose
    index_X2: torch.Tensor | None = None  # int32: tiles of all rows, where an indexer has a choice
    # Whether all this was there before the forward began, so that kernels may read it before they wait (`gdc_wait`).
    read_before_wait: bool = True

    @property
    def in_latent_space(self) -> bool:
        """Whether any row attends to what is cached as it is."""
        return self.decode_X2 is not None or self.prefill_X2 is not None or self.choosing


@dataclass(frozen=True)
class Tiles:
    """The tiles of a batch, on the host."""

    decode: list[tuple[int, int]]
    decode_tokens: int
    prefill: list[tuple[int, int]]
    prefill_tokens: int

    @classmethod
    def of(cls, spans: Sequence[Any], size: int, max_decode_tokens: int) -> Tiles:
        """Of spans of rows; prefill tiles have up to `size` tokens."""
        decode = [(span.start, span.new) for span in spans if span.new <= max_decode_tokens]
        prefill = [
            (at, min(size, span.start + span.new - at))
            for span in spans
            if span.new > max_decode_tokens
            for at in range(span.start, span.start + span.new, size)
        ]
        return cls(decode, triton.next_power_of_2(max((rows for _, rows in decode), default=1)), prefill, size)

    def in_decode(self) -> Tiles:
        """All as decode tiles."""
        tokens = max(self.decode_tokens, self.prefill_tokens if self.prefill else 1)
        return Tiles(self.decode + self.prefill, tokens, [], self.prefill_tokens)

    def fields(self, tensor: Callable[[list[tuple[int, int]]], torch.Tensor]) -> dict[str, Any]:
        """Those of `Rows`."""
        return {
            "decode_X2": tensor(self.decode) if self.decode else None,
            "decode_tokens": self.decode_tokens,
            "prefill_X2": tensor(self.prefill) if self.prefill else None,
            "prefill_tokens": self.prefill_tokens,
        }


def prefill_tile(group: int, wide: bool) -> int:
    """Tokens of a prompt that attend together, where so many heads share a key."""
    return max(1, (16 if wide else 64) // group)
