"""A step that passes through a pipeline: micro-batches, what is done with each, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.model.context import Routing
from moesaic.model.transformer import LayerRunner, Model, run_plainly


class MicroBatch(Protocol):
    tokens_T: Tensor
    lengths: list[int]


class Found(Protocol):
    """What an objective says of a micro-batch; `moesaic.train.objectives.Loss` is one."""

    total: Tensor
    parts: dict[str, Tensor]
    notes: dict[str, Tensor]


Objective = Callable[[Model, Any, Routing, LayerRunner], Found]


@dataclass
class PipelineLoss:
    """Sums over the micro-batches, of NAME_max the largest: `loss/NAME`, the objective's notes, `balance/NAME`."""

    total: Tensor
    parts: dict[str, Tensor]


@dataclass
class Step:
    """What `forward_backward` was asked for, and what this rank has found so far."""

    parts: Sequence[MicroBatch]
    objective: Objective
    runner: LayerRunner = run_plainly
    routing: Callable[[], Routing] = Routing
    extra: Callable[[Routing, float], dict[str, Tensor]] = lambda routing, share: {}
    count: Callable[[Routing], None] = lambda routing: None
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    frozen: bool = False
    found: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(len(part.tokens_T) for part in self.parts)

    def note(self, name: str, value: Tensor) -> None:
        so_far, value = self.found.get(name), value.detach().float()
        if so_far is None:
            so_far = torch.zeros_like(value)
        self.found[name] = torch.maximum(so_far, value) if name.endswith("_max") else so_far + value
