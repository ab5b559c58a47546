"""What of a request's cache stays: policies found by name, `moesaic serve DIR --kv-policy NAME --kv share=0.25`.

A policy says at which numbers of computed tokens it prunes (`due`), from which token on it wants to see attention
before that (`watch`), and what stays then (`prune`). Passes end at those numbers, so what a request says depends
neither on how its prompt was cut into chunks nor on what runs beside it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.serve.core.kv.encoding import Encoding

NEVER = sys.maxsize


@dataclass(frozen=True)
class TokenKinds:
    """Which tokens of the vocabulary are special, and which are punctuation alone."""

    special_V: Tensor
    punctuation_V: Tensor


@dataclass(frozen=True)
class AttentionStatistics:
    """One request's cache as a policy sees it: in every layer and head so many rows, oldest first, the newest last.

    Heads may have different numbers of rows; all end at the right, and `positions` is -1 where there is none.
    """

    computed: int  # tokens so far
    prompt: int  # of which so many were asked
    tokens: Sequence[int]
    positions_LNM: Tensor
    scores_LNM: Tensor  # attention each row got from the tokens that were watched, summed over a group's heads
    keys: Callable[[int], Tensor]  # of a layer: (N, M, C)
    kinds: Callable[[], TokenKinds]

    @property
    def there_LNM(self) -> Tensor:
        return self.positions_LNM >= 0

    def newest(self, count: int) -> Tensor:
        """The last so many rows of every head."""
        rows = self.positions_LNM.shape[-1]
        return torch.arange(rows, device=self.positions_LNM.device) >= rows - count


@dataclass(frozen=True)
class Kept:
    """Which rows stay; and, where rows are merged, onto which row of its head each one goes (itself, if onto none)."""

    rows_LNM: Tensor
    onto_LNM: Tensor | None = None


class KVPolicy:
    decay = 1.0  # what a token's attention counts for when the next one is watched
    encoding: Encoding | None = None  # how what stays is kept, after each pruning

    def due(self, computed: int, prompt: int) -> int:
        """The next number of computed tokens at which to prune."""
        raise NotImplementedError

    def watch(self, due: int, prompt: int) -> int:
        """The first token whose attention counts in what is pruned at `due`; `due` itself where none does."""
        return due

    def prune(self, seen: AttentionStatistics) -> Kept | None:
        """What stays; None: everything."""
        raise NotImplementedError

    def merge(self, keys_NMC: Tensor, values_NMC: Tensor, onto_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in which every row that others go onto has taken them up."""
        raise NotImplementedError


@dataclass(frozen=True)
class Budgeted(KVPolicy):
    """A policy that keeps a share of the rows: after the prompt, and again whenever `every` more tokens are written."""

    share: float = 0.25  # of all tokens so far
    least: int = 64  # rows that any head keeps
    every: int = 64  # tokens of the answer between two prunings; 0: the answer is kept whole

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("share must be above 0 and at most 1")
        if self.least < 1 or self.every < 0:
            raise ValueError("least must be at least 1, and every not negative")

    def due(self, computed: int, prompt: int) -> int:
        return rounds(computed, prompt, self.every)

    def budget(self, tokens: int) -> int:
        return min(tokens, max(self.least, math.ceil(self.share * tokens - 1e-9)))


def pooled(scores_LNM: Tensor, width: int) -> Tensor:
    """Every row with the highest score of those beside it, `width` in all: what stands beside a row with much attention
    stays with it, as the rest of a number of which only the beginning was looked at (SnapKV's pooling)."""
    return F.max_pool1d(scores_LNM, width, stride=1, padding=width // 2)


def check_pool(width: int) -> None:
    if width < 1 or width % 2 == 0:
        raise ValueError("pool must be odd (1: rows are chosen one by one)")


def rounds(computed: int, prompt: int, every: int) -> int:
    """At the end of the prompt, and every so many tokens after it."""
    if computed < prompt:
        return prompt
    return prompt + ((computed - prompt) // every + 1) * every if every else NEVER


def best(scores_LNM: Tensor, count: int | Tensor) -> Tensor:
    """So many rows of every head that score highest (of equals the oldest); how many may differ (L, N or L, 1)."""
    order = scores_LNM.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores_LNM.shape[-1], device=scores_LNM.device).expand_as(order)
    rank_LNM = torch.empty_like(order).scatter_(-1, order, places)
    return rank_LNM < (count.unsqueeze(-1) if isinstance(count, Tensor) else count)
