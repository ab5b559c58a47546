"""ScaLA (Zhang et al. 2021): embeddings are moved a little to where the loss is higher, and the step taken from there.

    train: {adversarial: {size: 0.05, delay: 0.3, every: 1}}

Steps of a large batch have little noise, and end in steep places of the loss that do not generalize. Noise against the
model leads them past these: one more forward, and one backward pass as far as the embeddings alone, say in which
direction the loss of each sequence rises. Early steps do not need it (`delay`), nor does every step (`every`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.model.block import Block
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.recipe import Recipe
from moesaic.recipe_sections import AdversarialSection
from moesaic.train.objectives import Loss, Objective


@dataclass(frozen=True)
class Adversarial(Objective):
    """An objective at embeddings that are moved by `size` of their norm, sequence by sequence."""

    inner: Objective
    section: AdversarialSection
    _now: list[bool] = field(default_factory=lambda: [False], init=False, repr=False, compare=False)

    def prepare(self, model: Model) -> None:
        self.inner.prepare(model)

    def begin_step(self, step: int, steps: int) -> None:
        self.inner.begin_step(step, steps)
        first = round(self.section.delay * steps)
        self._now[0] = step >= first and (step - first) % self.section.every == 0

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        if not self._now[0] or not torch.is_grad_enabled():
            return self.inner(model, batch, routing, runner)
        noise_TD = self.noise(model, batch, runner)
        return self.inner(model, batch, routing, _at_first_layer(runner, lambda x_TD: x_TD + noise_TD))

    def noise(self, model: Model, batch: Batch, runner: LayerRunner = run_plainly) -> Tensor:
        """Where the loss rises fastest; no parameter gets a gradient from it."""
        given: list[Tensor] = []

        def leaf(x_TD: Tensor) -> Tensor:
            given.append(x_TD.detach().requires_grad_())
            return given[0]

        loss = self.inner(model, batch, Routing(), _at_first_layer(runner, leaf))
        (x_TD,) = given
        (gradient_TD,) = torch.autograd.grad(loss.total, x_TD)
        with torch.no_grad():
            moved = [
                gradient * (self.section.size * x.norm() / gradient.norm().clamp(min=1e-30))
                for x, gradient in zip(
                    x_TD.float().split(batch.lengths), gradient_TD.float().split(batch.lengths), strict=True
                )
            ]
            return torch.cat(moved).to(x_TD.dtype)


def _at_first_layer(runner: LayerRunner, change: Callable[[Tensor], Tensor]) -> LayerRunner:
    def run(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return runner(block, number, change(x_TD) if number == 0 else x_TD, context)

    return run


def adversarial(recipe: Recipe, ranks: int = 1) -> Objective:
    """The recipe's objective, with noise against it where that is asked for."""
    objective, section = recipe.build("train.objective", Objective), recipe.train.adversarial
    if section is None:
        return objective
    if not objective.of_text:
        name = recipe.train.objective.name
        problem = f"moves the embeddings of text, and {name} weighs answers by what was recorded of them"
        raise UserError("train.adversarial", problem, "Leave it out, or align by sft alone.")
    if ranks > 1:
        raise UserError("train.adversarial", "is for one process yet", "Leave it out, or train in one process.")
    return Adversarial(objective, section)
