"""Averaging the weights of the last part of a run, in place of decaying the learning rate to nothing
("How Learning Rate Decay Wastes Your Best Data").

    train: {average: {kind: simple, share: 0.2, every: 10}}
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.model.transformer import Model
from moesaic.recipe import AverageSection


class WeightAverage:
    """A running average of the weights, taken every `every` steps from `1 - share` of the run on, counted from its last
    step: what was learned last is always in it."""

    def __init__(self, settings: AverageSection | None, steps: int) -> None:
        self.settings, self.steps = settings, steps
        self.first = steps + 1 if settings is None else round(steps * (1 - settings.share))
        self.taken = 0
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int, model: Model) -> None:
        """After step `step` (counted from 1)."""
        if self.settings is None or step < self.first or (self.steps - step) % self.settings.every:
            return
        self.taken += 1
        match self.settings.kind:
            case "simple":
                weight = 1 / self.taken
            case "weighted":  # later ones count more: 1, 2, 3, ...
                weight = 2 / (self.taken + 1)
            case "ema":
                weight = 1 - self.settings.decay if self.taken > 1 else 1.0
        for name, parameter in model.named_parameters():
            value = parameter.detach().float()
            if name not in self.tensors:
                self.tensors[name] = value.clone()
            else:
                self.tensors[name].lerp_(value, weight)

    def state(self) -> dict[str, Tensor]:
        facts = {"taken": self.taken, "first": self.first, "steps": self.steps}
        return {**{name: torch.tensor(number) for name, number in facts.items()}, **self.tensors}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """As it was saved, which may be before anything was taken; that of a run of other length is let go."""
        tensors = dict(tensors)
        usual = {"taken": 0, "first": self.first, "steps": self.steps}
        taken, *when = (int(tensors.pop(name, number)) for name, number in usual.items())
        self.taken, self.tensors = (taken, tensors) if when == [self.first, self.steps] else (0, {})
