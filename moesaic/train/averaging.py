"""Weight averaging over the last part of a run, in place of decaying the learning rate to zero
("How Learning Rate Decay Wastes Your Best Data").

    train: {average: {kind: simple, share: 0.2, every: 10}}
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.model.transformer import Model
from moesaic.recipe_sections import AverageSection
from moesaic.sharded import local


class WeightAverage:
    """A running average of the weights, updated every `every` steps from `1 - share` of the run on, counted back from
    its last step, whose weights are always in it."""

    def __init__(self, settings: AverageSection | None, steps: int) -> None:
        self.settings, self.steps = settings, steps
        self.first = steps + 1 if settings is None else round(steps * (1 - settings.share))
        self.count = 0
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int, model: Model) -> None:
        """After step `step` (counted from 1)."""
        if self.settings is None or step < self.first or (self.steps - step) % self.settings.every:
            return
        self.count += 1
        match self.settings.kind:
            case "simple":
                weight = 1 / self.count
            case "weighted":  # later ones count more: 1, 2, 3, ...
                weight = 2 / (self.count + 1)
            case "ema":
                weight = 1 - self.settings.decay if self.count > 1 else 1.0
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # what is frozen is its own average
                continue
            value = local(parameter.detach()).float()
            if name not in self.tensors:
                self.tensors[name] = value.clone()
            else:
                self.tensors[name].lerp_(value, weight)

    def state(self) -> dict[str, Tensor]:
        facts = {"taken": self.count, "first": self.first, "steps": self.steps}
        return {**{name: torch.tensor(number) for name, number in facts.items()}, **self.tensors}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """As it was saved, which may be before the first update; that of a run of other length is dropped."""
        tensors = dict(tensors)
        usual = {"taken": 0, "first": self.first, "steps": self.steps}
        count, *when = (int(tensors.pop(name, number)) for name, number in usual.items())
        self.count, self.tensors = (count, tensors) if when == [self.first, self.steps] else (0, {})
