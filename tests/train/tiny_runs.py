"""Runs of the one trainer on tiny sequences with a rule, for constraints to be compared on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moesaic.data.packing import IGNORED, Batch
from moesaic.methods import Method
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, Rope
from moesaic.model.context import Routing
from moesaic.model.transformer import Model
from moesaic.recipe import Recipe
from moesaic.recipe_sections import TrainSection
from moesaic.train.loop import train
from moesaic.train.objectives import shifted
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.run import Run
from tests.train.small import small_mixture

VOCAB, LENGTH, SEQUENCES = 40, 24, 16
CONFIG = small_mixture(
    VOCAB,
    32,
    GroupedQuery(2, 1, 16),
    Rope(8),
    [Layer(Dense(64)), Layer(Experts(count=4, per_token=2, hidden=32, score="sigmoid", correction=True))],
    init_std=0.1,
)


def batch(rule: int, step: int) -> Batch:
    """Sequences in which the token after a, b is one of a table that `rule` seeds, nine times of ten."""
    table_VV = torch.randint(VOCAB, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(rule))
    table_VV = table_VV[:, torch.arange(VOCAB) % 6]  # of the token before, little counts
    generator = torch.Generator().manual_seed(1000 * rule + step)
    tokens_SL = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=generator)
    follows_SL = torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.9
    for at in range(2, LENGTH):
        expected_S = table_VV[tokens_SL[:, at - 1], tokens_SL[:, at - 2]]
        tokens_SL[:, at] = torch.where(follows_SL[:, at], expected_S, tokens_SL[:, at])
    tokens_T, lengths = tokens_SL.flatten(), [LENGTH] * SEQUENCES
    count = len(tokens_T) - SEQUENCES
    return Batch(tokens_T, shifted(tokens_T, lengths, 1, IGNORED), lengths, [0] * SEQUENCES, count, {"step": step + 1})


class RuleStream(Iterator[Batch]):
    def __init__(self, rule: int, step: int = 0) -> None:
        self.rule, self.step = rule, step

    @property
    def position(self) -> dict[str, Any]:
        return {"step": self.step}

    def from_position(self, position: Mapping[str, Any] | None) -> RuleStream:
        return RuleStream(self.rule, 0 if position is None else position["step"])

    def skip(self, past: int | Mapping[str, Any]) -> RuleStream:
        return self

    def __next__(self) -> Batch:
        self.step += 1
        return batch(self.rule, self.step - 1)


def trained(model: Model, out: Path, rule: int, steps: int, lr: float = 0.003, **settings: Any) -> Model:
    """A copy of the model after a run on a rule's sequences."""
    recipe = Recipe(
        train=TrainSection(steps=steps, warmup_steps=min(5, steps - 1), dtype="float32", **settings),
        optimizer=Method("adamw", {"lr": lr, "weight_decay": 0.0}),
        schedule=Method("linear", {"floor": 0.05}),
    )
    own = copy.deepcopy(model)
    run = Run(recipe, out, quiet=True, initial=(own, {}, []), stream=lambda _: RuleStream(rule))
    run.plots = False
    train(run)
    return run.model


@torch.no_grad()
def loss_of(model: Model, rule: int, batches: int = 8) -> float:
    """On sequences that no run sees."""
    return sum(float(NextToken()(model, batch(rule, 10_000 + n), Routing()).total) for n in range(batches)) / batches
