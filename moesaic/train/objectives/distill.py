"""Learn from a teacher's whole next-token distribution, not only from the token that came.

    train: {objective: {name: distill, teacher: out/large, weight: 0.9, temperature: 1.0}}
    train: {objective: {name: distill, teacher: out/large, teaching: 0.7}}     the last part on the text alone (staged)
    train: {objective: {name: distill, teacher: out/large, hidden: 1.0}}       hidden states too, layer by layer

The loss is weight * KL(teacher || student) + (1 - weight) * cross-entropy, both per target token. `hidden` adds the
squared distance of the student's hidden states from the teacher's at the same share of the depth, against their size
(as TinyBERT and TernaryBERT do). With `further` teachers each sequence has one of them, by its number in the column
`teacher`. With `teaching` below 1 the loss changes where the teacher leaves: a run that watches
for spikes (`train.spike`) must not take that for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.kernels.cross_entropy import IGNORED, ROWS
from moesaic.model.block import Block
from moesaic.model.config import ModelConfig
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.directory import load
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.layout import Layout
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective, layout_of

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Distill(Objective):
    teacher: str
    weight: float = 0.9
    temperature: float = 1.0
    direction: Direction = "forward"  # reverse: KL(student || teacher)
    teaching: float = 1.0  # share of the run in which the teacher is followed (Mixture-of-Students, DeepSpeed-MoE)
    hidden: float = 0.0  # weight of the hidden states
    further: tuple[str, ...] = ()  # teachers number 1, 2, ...
    _loaded: list[Model] = field(default_factory=list, init=False, repr=False, compare=False)
    _gone: list[bool] = field(default_factory=lambda: [False], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or self.temperature <= 0:
            raise ValueError("weight must be from 0 to 1, and temperature above 0")
        if not 0 <= self.teaching <= 1 or self.hidden < 0:
            raise ValueError("teaching must be from 0 to 1, and hidden not negative")
        if self.hidden and self.further:
            raise ValueError("hidden is of one teacher, and there are several")

    def check_model(self, config: ModelConfig) -> None:
        for place in (self.teacher, *self.further):
            self._check_teacher(place, config)

    def _check_teacher(self, place: str, config: ModelConfig) -> None:
        teacher = match(open_checkpoint(place))[0]
        if teacher.vocab != config.vocab:
            raise UserError(
                place,
                f"has a vocabulary of {teacher.vocab}, the model one of {config.vocab}",
                "A teacher must share the student's tokenizer.",
            )
        if self.hidden and teacher.hidden != config.hidden:
            problem = f"has hidden states of {teacher.hidden}, the model of {config.hidden}"
            raise UserError(place, problem, "Leave out hidden.")

    def prepare(self, model: Model) -> None:
        self.check_model(model.config)
        places = (self.teacher, *self.further)
        self._loaded[:] = [load(place, device=model.device).requires_grad_(False) for place in places]

    def begin_step(self, step: int, steps: int) -> None:
        self._gone[0] = step >= self.teaching * steps

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        if self._gone[0]:
            return self._text_alone(model, batch, routing, runner)
        layout = layout_of(batch)
        states: list[Tensor] = []
        teacher_states: list[Tensor] = []
        hidden_TD = model(batch.tokens_T, layout, routing, self._keeping(states, runner))
        apart = hidden_TD.new_zeros((), dtype=torch.float32)
        plain = apart
        for teacher, mine in self._taught(batch):
            with torch.no_grad():
                keeping = self._keeping(teacher_states, run_plainly)
                teacher_MD = teacher(batch.tokens_T[mine.rows_M], mine.layout, runner=keeping)
            for some in mine.kept_A.split(ROWS):
                rows = mine.rows_M[some]
                kl, ce = torch.utils.checkpoint.checkpoint(  # logits of a few rows at a time, and again in backward
                    self._rows, model, hidden_TD[rows], teacher.logits_at(teacher_MD, some), batch.targets_T[rows],
                    use_reentrant=False,
                )  # fmt: skip
                apart, plain = apart + kl, plain + ce
        apart, plain = apart / batch.count, plain / batch.count
        total = self.weight * apart + (1 - self.weight) * plain
        parts = {"kl": apart.detach(), "next": plain.detach()}
        if self.hidden:
            kept_T = (batch.targets_T != IGNORED).nonzero().squeeze(1)
            parts["hidden"] = _states_apart(states, teacher_states, kept_T) / batch.count
            total, parts["hidden"] = total + self.hidden * parts["hidden"], parts["hidden"].detach()
        return Loss(total, parts, routing)

    def _taught(self, batch: Batch) -> Iterator[tuple[Model, _Share]]:
        """Each teacher that has something to say of this batch, and the sequences it says it of."""
        numbers_T = batch.columns.get("teacher")
        for number, teacher in enumerate(self._loaded):
            if numbers_T is None:
                yield teacher, _Share(batch, torch.ones_like(batch.targets_T, dtype=torch.bool))
                return
            if (mine_T := numbers_T == number).any():
                yield teacher, _Share(batch, mine_T)

    def _text_alone(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner) -> Loss:
        hidden_TD = model(batch.tokens_T, layout_of(batch), routing, runner)
        scale_T = torch.full(batch.targets_T.shape, 1.0 / max(batch.count, 1), device=hidden_TD.device)
        total, _ = model.cross_entropy(hidden_TD, batch.targets_T, scale_T)
        return Loss(total, {"next": total.detach()}, routing)

    def _keeping(self, states: list[Tensor], runner: LayerRunner) -> LayerRunner:
        """The same, but what every layer gives is kept, if that is wanted."""

        def run(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
            states.append(runner(block, number, x_TD, context))
            return states[-1]

        return run if self.hidden else runner

    def _rows(self, model: Model, hidden_TD: Tensor, teacher_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        logits_TV = model.logits_at(hidden_TD).float()
        kl = divergence(logits_TV, teacher_TV, self.temperature, self.direction).sum() * self.temperature**2
        return kl, torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="sum")


class _Share:
    """Some of a batch's sequences, of which every row is marked."""

    def __init__(self, batch: Batch, mine_T: Tensor) -> None:
        self.rows_M = mine_T.nonzero().squeeze(1)
        own = [rows_L for rows_L in mine_T.split(batch.lengths) if rows_L.any()]
        self.layout = Layout([len(rows_L) for rows_L in own], device=batch.tokens_T.device)
        self.kept_A = (batch.targets_T[self.rows_M] != IGNORED).nonzero().squeeze(1)


def _states_apart(states: list[Tensor], teacher_states: list[Tensor], rows_A: Tensor) -> Tensor:
    """The sum over tokens of the squared distances, against the teacher's size, on average over the layers."""
    total = states[0].new_zeros((), dtype=torch.float32)
    for number, own_TD in enumerate(states, 1):
        wanted_AD = teacher_states[round(number / len(states) * len(teacher_states)) - 1][rows_A].float()
        off_A = (own_TD[rows_A].float() - wanted_AD).square().mean(1)
        total = total + (off_A / wanted_AD.square().mean(1).clamp(min=1e-8)).sum()
    return total / len(states)


def divergence(
    student_TV: Tensor, teacher_TV: Tensor, temperature: float = 1.0, direction: Direction = "forward"
) -> Tensor:
    """The terms of KL(teacher || student), or of the reverse, from the logits of both; a token's are its row's sum."""
    student_TV = (student_TV / temperature).log_softmax(-1)
    teacher_TV = (teacher_TV.float() / temperature).log_softmax(-1)
    one_TV, other_TV = (teacher_TV, student_TV) if direction == "forward" else (student_TV, teacher_TV)
    return one_TV.exp() * (one_TV - other_TV)
