"""KV cache pruning, one policy a file: `moesaic serve DIR --kv-policy NAME --kv share=0.25`.

A policy defines at which numbers of computed tokens it prunes (`due`), from which token on attention is scored before
that (`score_from`), and which rows are retained then (`prune`). Chunks end at those numbers, so the output of a request
depends neither on how its prompt was cut into chunks nor on the rest of the batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """One request's KV cache as a policy sees it: the rows of every layer and head, oldest first.

    Rows may be ragged: layers and heads have kept different numbers of them. All end at the right, and where a head has
    no row `positions` is -1, its score 0, and its key undefined. Until the first pruning no row is missing.
    """

    computed: int  # tokens so far
    prompt: int  # of them, in the prompt
    tokens: Sequence[int]
    positions_LNM: Tensor
    scores_LNM: Tensor  # attention each row got from the scored tokens, summed over a group's query heads
    keys: Callable[[int], Tensor]  # of a layer: (N, M, C)
    kinds: Callable[[], TokenKinds]
    notes: dict[str, Any] = field(default_factory=dict)  # the policy's own about this request, kept between prunings

    @property
    def present_LNM(self) -> Tensor:
        return self.positions_LNM >= 0

    def newest(self, count: int) -> Tensor:
        """The last so many rows of every head."""
        rows = self.positions_LNM.shape[-1]
        return torch.arange(rows, device=self.positions_LNM.device) >= rows - count


@dataclass(frozen=True)
class Retained:
    """The rows that stay (a boolean for each), and, where rows are merged, the row of its head that each one is merged
    into (itself, if into none).

    Rows that are missing are ignored, and the newest row stays in any case. Every head may retain as many rows as it
    likes, with two exceptions (`check`). Quantized rows lie in blocks of all heads of a layer: a policy with an
    `encoding` retains equally many rows in each of these heads, and every row that is quantized already. And rows are
    merged only where none is missing.
    """

    rows_LNM: Tensor
    onto_LNM: Tensor | None = None

    def check(self, policy: KVPolicy, present_LNM: Tensor, encoded: Sequence[int]) -> None:
        """Refuse what cannot be packed into pages; `encoded` is how many rows of a layer's heads are quantized."""
        name = f"{type(policy).__name__}.prune"
        if self.rows_LNM.dtype != torch.bool or self.rows_LNM.shape != present_LNM.shape:
            raise ValueError(f"{name}: retained rows must be booleans of shape {tuple(present_LNM.shape)}")
        rows_LNM = self.rows_LNM & present_LNM
        rows_LNM[..., -1] = True
        if self.onto_LNM is not None:
            if self.onto_LNM.shape != present_LNM.shape or not bool(present_LNM.all()):
                raise ValueError(f"{name}: rows can be merged only where no head misses any, each into one of its head")
            if not bool(rows_LNM.gather(-1, self.onto_LNM).all()):
                raise ValueError(f"{name}: rows must be merged into rows that are retained")
        if policy.encoding is not None:
            counts_LN = rows_LNM.sum(-1)
            if bool((counts_LN != counts_LN[:, :1]).any()):
                raise ValueError(f"{name}: with an encoding, all heads of a layer must retain equally many rows")
            pruned_LN = counts_LN != present_LNM.sum(-1)
            if any(count and bool(pruned_N.any()) for count, pruned_N in zip(encoded, pruned_LN, strict=True)):
                raise ValueError(f"{name}: rows that are quantized already cannot be pruned")


class KVPolicy:
    decay = 1.0  # of the scores, with every token
    encoding: Encoding | None = None  # how retained rows are quantized, after each pruning

    def due(self, computed: int, prompt: int) -> int:
        """The next number of computed tokens at which to prune."""
        raise NotImplementedError

    def score_from(self, due: int, prompt: int) -> int:
        """The first token whose attention is scored for the pruning at `due`; `due` itself where none is."""
        return due

    def prune(self, statistics: AttentionStatistics) -> Retained | None:
        """The rows to retain; None: all."""
        raise NotImplementedError

    def merge(self, keys_NMC: Tensor, values_NMC: Tensor, onto_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer after every row is merged into the one it goes onto."""
        raise NotImplementedError


@dataclass(frozen=True)
class Budgeted(KVPolicy):
    """A policy with a budget of rows: after the prefill, and again every `every` generated tokens."""

    share: float = 0.25  # of all tokens so far
    least: int = 64  # rows that every head retains
    every: int = 64  # generated tokens between two prunings; 0: generated tokens are never pruned

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("share must be above 0 and at most 1")
        if self.least < 1 or self.every < 0:
            raise ValueError("least must be at least 1, and every not negative")

    def due(self, computed: int, prompt: int) -> int:
        return next_round(computed, prompt, self.every)

    def budget(self, tokens: int) -> int:
        return min(tokens, max(self.least, math.ceil(self.share * tokens - 1e-9)))


@dataclass(frozen=True)
class PromptWindow(Budgeted):
    """A policy that prunes once, after the prompt, by the attention of its last tokens."""

    window: int = 16  # last tokens of the prompt whose attention counts
    pool: int = 13  # width of the max pooling over scores; 1: none
    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every:
            raise ValueError("every must be 0: this policy looks at the prompt, once")
        check_pool(self.pool)
        if self.window < 1:
            raise ValueError("window must be at least 1")

    def score_from(self, due: int, prompt: int) -> int:
        return max(0, due - self.window)


def pooled(scores_LNM: Tensor, width: int) -> Tensor:
    """Max pooling over `width` neighbours (SnapKV): what stands beside a row with much attention stays with it, as the
    rest of a number of which only the first digits are attended to."""
    return F.max_pool1d(scores_LNM, width, stride=1, padding=width // 2)


def check_pool(width: int) -> None:
    if width < 1 or width % 2 == 0:
        raise ValueError("pool must be odd (1: rows are chosen one by one)")


def next_round(computed: int, prompt: int, every: int) -> int:
    """The end of the prefill, and every so many generated tokens after it."""
    if computed < prompt:
        return prompt
    return prompt + ((computed - prompt) // every + 1) * every if every else NEVER


def top_rows(scores_LNM: Tensor, count: int | Tensor) -> Tensor:
    """The rows of every head with the highest scores (of equals the oldest); counts may differ (L, N or L, 1)."""
    order = scores_LNM.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores_LNM.shape[-1], device=scores_LNM.device).expand_as(order)
    rank_LNM = torch.empty_like(order).scatter_(-1, order, places)
    return rank_LNM < (count.unsqueeze(-1) if isinstance(count, Tensor) else count)
