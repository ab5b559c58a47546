"""Validation loss: the loss on held-out text, measured during a run: `loss/held_out` in metrics.jsonl.

    train: {evaluate_every: 100, evaluate_tokens: 65536}
    data: {held_out: 0.01}

The same text every time, sampled evenly from all of it, so that two values differ by the weights alone. Plain
next-token cross-entropy, without layer runners and whatever an objective adds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moesaic.data.held_out import held_out_batches
from moesaic.data.shards import Shards
from moesaic.data.stream import Stream, TokenStream
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import Recipe
from moesaic.train.objectives import inputs_of, layout_of

BATCH = 8192  # tokens of a forward pass


class HeldOutLoss:
    def __init__(
        self, data: Shards, *, tokens: int, sequence_length: int, world: World, source: str | None = None
    ) -> None:
        size = min(BATCH, tokens)
        found = held_out_batches(
            data, batch_tokens=size, sequence_length=sequence_length, max_tokens=tokens, source=source
        )
        self.world = world
        self.batches = [part for batch in found for part in batch.parts(1, world.device)]
        self.count = sum(int((batch.targets_T != IGNORED).sum()) for batch in self.batches)

    @torch.no_grad()
    def __call__(self, model: Model) -> float:
        """Data ranks take turns; all take part in each round, whose last may have too few batches, with nothing to
        count."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        ranks = self.world.data_ranks
        for first in range(0, len(self.batches), ranks):
            number = first + self.world.data_rank
            batch = self.batches[min(number, len(self.batches) - 1)]
            hidden_TD = model(inputs_of(model, batch), layout_of(batch))
            counts_T = (batch.targets_T != IGNORED).float() * (number < len(self.batches))
            loss, _ = model.cross_entropy(hidden_TD, batch.targets_T, counts_T)
            total += loss
        return float(self.world.add_up({"total": total})["total"]) / self.count


def held_out_measure(stream: Stream, recipe: Recipe, world: World) -> Callable[[Model], dict[str, float]] | None:
    """What a run on this stream measures every `train.evaluate_every` steps."""
    settings = recipe.train
    if not settings.evaluate_every or not isinstance(stream, TokenStream):
        return None
    length = recipe.data.sequence_length
    held_out = HeldOutLoss(stream.data, tokens=settings.evaluate_tokens, sequence_length=length, world=world)
    return lambda model: {"loss/held_out": float(held_out(model))}
