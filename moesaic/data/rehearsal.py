"""A stream of changing domains with an episodic memory: every batch brings some of what came before along.

    train: {memory: {ram: 512, disk: 16384, replay: 0.25}}

The new tokens of a step, and their order, are those of the run without a memory; what is replayed comes on top of
them, and costs what it is. Sequences of the domains in the batch are not replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.data.memory import EpisodicMemory
from moesaic.data.packing import IGNORED, Batch
from moesaic.data.stream import TokenStream
from moesaic.recipe import Recipe

GROUP = "memory"


class RehearsalStream(TokenStream):
    memory: EpisodicMemory
    replay: float
    chosen = False  # whether replay and the memory's size in RAM may be others than the recipe's

    @classmethod
    def remembering(cls, directory: Path, recipe: Recipe, folder: Path) -> RehearsalStream:
        stream = cls.open(directory, recipe)
        assert isinstance(stream, RehearsalStream) and recipe.train.memory is not None
        section, choice = recipe.train.memory, recipe.train.memory.choose
        stream.chosen, seed = choice is not None, recipe.data.seed
        places = max(section.disk, *choice.ram) if choice is not None and choice.ram else section.disk
        stream.memory = EpisodicMemory(folder, section.ram, places, section.swap, seed, apart=stream.chosen)
        stream.replay = section.replay
        return stream

    def use(self, ram: int, replay: float) -> None:
        self.memory.resize(ram)
        self.replay = replay

    def ahead(self, batches: int) -> Batch:
        """The new tokens after so many batches more. The stream stays where it is."""
        stream = super()._at(self.tokens, self.step)
        for _ in range(batches + 1):
            batch = TokenStream.__next__(stream)
        return batch

    def __next__(self) -> Batch:
        batch = super().__next__()
        sequences = [one.numpy() for one in batch.tokens_T.split(batch.lengths)]
        again = self.memory.replay(round(self.replay * len(batch.tokens_T)), set(batch.domains))
        long = [(tokens, domain) for tokens, domain in zip(sequences, batch.domains, strict=True) if len(tokens) > 1]
        self.memory.remember([tokens for tokens, _ in long], [domain for _, domain in long])
        return _with(batch, again)

    def state(self) -> dict[str, dict[str, Tensor]]:
        chosen = {"chosen": torch.tensor([self.memory.ram, self.replay], dtype=torch.float64)} if self.chosen else {}
        return {GROUP: self.memory.state() | chosen}

    def restore(self, group: Callable[[str], dict[str, Tensor]]) -> None:
        state = group(GROUP)
        if self.chosen and "chosen" in state:
            ram, self.replay = state["chosen"].tolist()
            self.memory.ram = int(ram)
        self.memory.restore(state)

    def close(self) -> None:
        self.memory.close()

    def _at(self, tokens: int, step: int) -> RehearsalStream:
        stream = super()._at(tokens, step)
        assert isinstance(stream, RehearsalStream)
        stream.memory, stream.replay, stream.chosen = self.memory, self.replay, self.chosen
        return stream


def open_tokens(directory: Path, recipe: Recipe, folder: Path, rank: int = 0, ranks: int = 1) -> TokenStream:
    """The batches of a recipe, with a memory in `folder` where it asks for one."""
    if recipe.train.memory is not None:
        return RehearsalStream.remembering(directory, recipe, folder)
    return TokenStream.open(directory, recipe, rank=rank, ranks=ranks)


def _with(batch: Batch, again: list[tuple[np.ndarray, int]]) -> Batch:
    """The batch with these sequences behind its own."""
    notes: dict[str, Any] = {"replayed": float(sum(len(tokens) for tokens, _ in again))}
    if not again:
        batch.notes |= notes
        return batch
    old = batch_of([tokens for tokens, _ in again], [domain for _, domain in again])
    lengths = batch.lengths + old.lengths
    return Batch(
        torch.cat([batch.tokens_T, old.tokens_T]),
        torch.cat([batch.targets_T, old.targets_T]),
        lengths,
        batch.domains + old.domains,
        sum(lengths) - len(lengths),
        batch.position_after,
        batch.columns,
        batch.notes | notes,
        everywhere=lengths,
    )


def batch_of(sequences: list[np.ndarray], domains: list[int]) -> Batch:
    tokens = [torch.from_numpy(one) for one in sequences]
    targets = [torch.cat([one[1:], one.new_tensor([IGNORED])]) for one in tokens]
    lengths = [len(one) for one in tokens]
    return Batch(torch.cat(tokens), torch.cat(targets), lengths, domains, sum(lengths) - len(lengths))
