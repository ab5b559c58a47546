"""Averaging the weights of the last part of a run, in place of decaying the learning rate to nothing
("How Learning Rate Decay Wastes Your Best Data").

    train: {average: {kind: simple, share: 0.2, every: 10}}
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.model.transformer import Model
from moesaic.recipe import AverageSection


class Average:
    """A running average of the weights, taken every `every` steps from `1 - share` of the run on."""

    def __init__(self, settings: AverageSection | None, steps: int) -> None:
        self.settings = settings
        self.first = steps + 1 if settings is None else round(steps * (1 - settings.share))
        self.taken = 0
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int, model: Model) -> None:
        """After step `step` (counted from 1)."""
        if self.settings is None or step < self.first or (step - self.first) % self.settings.every:
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
        return {"taken": torch.tensor(self.taken), "first": torch.tensor(self.first), **self.tensors}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """As it was saved, which may be before anything was taken; that of a run of other length is let go."""
        tensors = dict(tensors)
        taken, first = int(tensors.pop("taken", 0)), int(tensors.pop("first", self.first))
        self.taken, self.tensors = (taken, tensors) if first == self.first else (0, {})
