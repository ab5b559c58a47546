"""Learn from a teacher's whole next-token distribution, not only from the token that came.

    train: {objective: {name: distill, teacher: out/large, weight: 0.9, temperature: 1.0}}

The loss is weight * KL(teacher || student) + (1 - weight) * cross-entropy, both per target token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.kernels.cross_entropy import IGNORED, ROWS
from moesaic.model.context import Routing
from moesaic.model.directory import load
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective, layout_of

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Distill(Objective):
    teacher: str
    weight: float = 0.9
    temperature: float = 1.0
    direction: Direction = "forward"  # reverse: KL(student || teacher)
    _loaded: list[Model] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or self.temperature <= 0:
            raise ValueError("weight must be from 0 to 1, and temperature above 0")

    def check(self) -> None:
        match(open_checkpoint(self.teacher))

    def prepare(self, model: Model) -> None:
        teacher = load(self.teacher, device=model.device)
        if teacher.config.vocab != model.config.vocab:
            raise UserError(
                self.teacher,
                f"has a vocabulary of {teacher.config.vocab}, the model one of {model.config.vocab}",
                "A teacher must share the student's tokenizer.",
            )
        self._loaded[:] = [teacher.requires_grad_(False)]

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        (teacher,) = self._loaded
        layout = layout_of(batch)
        with torch.no_grad():
            teacher_TD = teacher(batch.tokens_T, layout)
        hidden_TD = model(batch.tokens_T, layout, routing, runner)
        kept_T = (batch.targets_T != IGNORED).nonzero().squeeze(1)
        apart = hidden_TD.new_zeros((), dtype=torch.float32)
        plain = apart
        for rows in kept_T.split(ROWS):
            kl, ce = torch.utils.checkpoint.checkpoint(  # logits of a few rows at a time, again in the backward pass
                self._rows, model, hidden_TD[rows], teacher.logits_at(teacher_TD, rows), batch.targets_T[rows],
                use_reentrant=False,
            )  # fmt: skip
            apart, plain = apart + kl, plain + ce
        apart, plain = apart / batch.count, plain / batch.count
        total = self.weight * apart + (1 - self.weight) * plain
        return Loss(total, {"kl": apart.detach(), "next": plain.detach()}, routing)

    def _rows(self, model: Model, hidden_TD: Tensor, teacher_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TV = model.logits_at(hidden_TD).float()
        kl = divergence(logits_TV, teacher_TV, self.temperature, self.direction).sum() * self.temperature**2
        return kl, torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="sum")


def divergence(
    student_TV: Tensor, teacher_TV: Tensor, temperature: float = 1.0, direction: Direction = "forward"
) -> Tensor:
    """The terms of KL(teacher || student), or of the reverse, from the logits of both; a token's are its row's sum."""
    student_TV = (student_TV / temperature).log_softmax(-1)
    teacher_TV = (teacher_TV.float() / temperature).log_softmax(-1)
    one_TV, other_TV = (teacher_TV, student_TV) if direction == "forward" else (student_TV, teacher_TV)
    return one_TV.exp() * (one_TV - other_TV)
