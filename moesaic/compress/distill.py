"""Distil the large model into a smaller one: next-token distributions, on the calibration text, resumable.

The student's weights may be rounded as they are learned; the rounding passes gradients through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from moesaic.compress.job import Job
from moesaic.model.config import ModelConfig
from moesaic.model.directory import load
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.train.objectives.distill import divergence

SAVE_EVERY = 25
Rounding = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Distillation:
    steps: int
    rate: float
    teaching: float = 1.0  # share of the steps in which the teacher is followed; then the text alone (staged)
    weight: float = 0.9  # of the teacher against the text


def plain(name: str, tensor: Tensor) -> Tensor:
    return tensor


def reduced(job: Job, kept: list[int], config: ModelConfig) -> dict[str, Tensor]:
    """A student's first weights: the layers of the teacher that `kept` names, and everything around them."""
    with torch.device("meta"):
        names = list(Model(config).state_dict())
    found = {}
    for name in names:
        where = name.split(".")
        if where[0] == "layers":
            where[1] = str(kept[int(where[1])])
        found[name] = job.tensor(".".join(where))
    return found


def train_student(
    job: Job, config: ModelConfig, weights: dict[str, Tensor], distillation: Distillation, rounding: Rounding = plain
) -> dict[str, Tensor]:
    """The student's weights after training, before rounding."""
    with torch.device("meta"):
        student = Model(config, job.mode)
    learned = {name: tensor.clone() for name, tensor in weights.items()}
    trained = [name for name, _ in student.named_parameters()]
    first = {name: torch.zeros_like(learned[name]) for name in trained}
    second = {name: torch.zeros_like(learned[name]) for name in trained}
    saved = job.store.state()
    start = 0
    if saved is not None:
        start = saved[0]
        for kind, where in (("weight", learned), ("first", first), ("second", second)):
            where |= {
                k.removeprefix(f"{kind}/"): t.to(job.device) for k, t in saved[1].items() if k.startswith(f"{kind}/")
            }
    if start >= distillation.steps:
        return learned
    student.load_state_dict(learned, assign=True)
    teacher = load(job.source, dtype=torch.float32, device=job.device, threads=torch.get_num_threads(), mode=job.mode)
    teacher.requires_grad_(False)
    for step in range(start, distillation.steps):
        job.progress("distilling", step, distillation.steps)
        tokens_T = torch.tensor(job.sequences[step % len(job.sequences)], device=job.device)
        weight = distillation.weight if step < distillation.teaching * distillation.steps else 0.0
        leaves = {name: learned[name].requires_grad_() for name in trained}
        with torch.enable_grad():
            loss = _loss(student, teacher, {n: rounding(n, t) for n, t in leaves.items()}, tokens_T, weight)
            gradients = torch.autograd.grad(loss, [leaves[name] for name in trained], allow_unused=True)
        rate = distillation.rate * min(1.0, (step + 1) / 10) * (1 - step / distillation.steps)
        with torch.no_grad():
            for name, gradient in zip(trained, gradients, strict=True):
                learned[name].requires_grad_(False)
                if gradient is not None:
                    _adam(learned[name], gradient, first[name], second[name], step + 1, rate)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == distillation.steps:
            everything = {"weight": learned, "first": first, "second": second}
            state = {f"{kind}/{name}": tensor for kind, group in everything.items() for name, tensor in group.items()}
            job.store.put_state(step + 1, state)
    return learned


def _loss(student: Model, teacher: Model, weights: dict[str, Tensor], tokens_T: Tensor, weight: float) -> Tensor:
    layout = Layout([len(tokens_T)], device=tokens_T.device)
    hidden_TD: Tensor = functional_call(student, weights, (tokens_T, layout))
    logits_TV = F.linear(hidden_TD[:-1], weights["embed" if student.config.tied else "head"])
    loss = (1 - weight) * F.cross_entropy(logits_TV, tokens_T[1:])
    if weight:
        with torch.no_grad():
            teacher_TV = teacher.logits_at(teacher(tokens_T, layout)[:-1])
        loss = loss + weight * divergence(logits_TV, teacher_TV).sum(-1).mean()
    return loss


def _adam(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, rate: float) -> None:
    first.lerp_(gradient, 0.1)
    second.lerp_(gradient.square(), 0.05)
    size = (second / (1 - 0.95**step)).sqrt_().add_(1e-8)
    weight.sub_(first / (1 - 0.9**step) / size * rate)
