"""Which rows of a step are tokens of prompts, whose latents are expanded, and what they attend to.

A token of a prompt attends to expanded keys and values, any other to latents. The rule looks at nothing but the
request: a text depends neither on the batch, nor on how its prompt was cut, nor on whether the request was preempted.
Only the first LIMIT tokens are expanded, because those of one sequence have to fit into one round. Where an indexer
chooses topk tokens to attend to, the first MASKED * topk are: so far it is cheaper to look at all, most of them under a
mask, than to gather latents for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

LIMIT = 32768  # rows of a round: 2 GiB of keys and values at 128 heads of 128 + 128
MASKED = 3
IN_TILES, CHOOSING = 1, 2  # kinds of rows, beside those that attend to expanded latents
LEAST = 128  # rows of a round: from so many on the library's matmul does not look at how many there are


@dataclass(frozen=True)
class Prompts:
    """On the device. The latents of all sequences with prompt rows are expanded in `rounds`, each with as many rows."""

    tiles_N4: torch.Tensor  # int32: first row, rows, where its sequence begins in the round, the round
    sequences_X: torch.Tensor  # int32: of all rounds
    positions_X: torch.Tensor  # int32: -1 for a row that is none
    rounds: int


def prompt_rows(start: int, new: int, prompt: int, topk: int = 0) -> int:
    """How many of the next rows of a sequence are expanded, where so many of its tokens are a prompt."""
    limit = min(MASKED * topk, LIMIT) if topk else LIMIT
    return max(0, min(start + new, prompt, limit) - start)


@dataclass(frozen=True)
class ExpansionPlan:
    """On the host: the sequences with prompt rows (sequence, its tokens so far), round by round."""

    rounds: list[list[tuple[int, int]]]
    size: int  # rows of a round, a power of two
    begins: list[tuple[int, int]]  # of each sequence: where in the round, which round

    @classmethod
    def of(cls, contexts: Iterable[tuple[int, int]]) -> ExpansionPlan:
        rounds: list[list[tuple[int, int]]] = [[]]
        begins, most, used = [], 0, 0
        for sequence, length in contexts:
            if used + length > LIMIT:
                rounds.append([])
                used = 0
            begins.append((used, len(rounds) - 1))
            rounds[-1].append((sequence, length))
            used += length
            most = max(most, used)
        size = LEAST
        while size < most:
            size *= 2
        return cls(rounds, size, begins)

    def fill(self, sequences_X: np.ndarray, positions_X: np.ndarray) -> None:
        """Of all rounds; what is not used stays as it is."""
        for number, members in enumerate(self.rounds):
            at = number * self.size
            for sequence, length in members:
                sequences_X[at : at + length] = sequence
                positions_X[at : at + length] = np.arange(length)
                at += length
