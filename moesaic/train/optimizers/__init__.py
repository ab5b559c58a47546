"""Optimizers, one file each: how a gradient moves a weight.

    method = recipe.build("optimizer", OptimizerMethod)               # optimizer: {name: muon, lr: 3e-4}
    optimizer = method.build(model.named_parameters())
    loss.backward()
    result = optimizer.step(lr_factor, clip=1.0)                      # the schedule gives the factor
    optimizer.zero_grad()

A method says which parameters go by which rule, and a rule how a list of weights is updated. All else is in
`_optimizer.py`, the same for every method: float32 masters, the norm, clipping, skipped steps, saving and loading.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from moesaic.recipe_offload import OffloadSection
from moesaic.train.optimizers._offloaded import OffloadedOptimizer
from moesaic.train.optimizers._optimizer import Named, Optimizer, Rule, Slot, Step, StepResult
from moesaic.train.optimizers._roles import by_decay, role

__all__ = ["Named", "Optimizer", "OptimizerMethod", "Rule", "Slot", "Step", "StepResult", "by_decay", "need", "role"]


class OptimizerMethod:
    """An optimizer as a recipe describes it."""

    lr: float  # the peak learning rate; a step uses its schedule's share of it
    reduces_gradients: ClassVar[bool] = False  # whether, given a group, it takes gradients not yet reduced over it

    def groups(self, parameters: list[Named]) -> list[tuple[Rule, list[Named]]]:
        """Which rule updates which parameters; each parameter belongs to one rule."""
        raise NotImplementedError

    def build(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        offload: OffloadSection | None = None,
    ) -> Optimizer:
        """The optimizer of these parameters, as they are now; one that takes no gradient is left out.

        `group` is of ranks that hold equal parameters and have gradients of other data. A method that reduces gradients
        is given it, gets each rank's share of the gradients as it came, and sees to it that parameters stay equal; of
        any other method's gradients the caller takes the sum over ranks first. `offload`: what is not on the device.
        """
        assert group is None or self.reduces_gradients, "these gradients are reduced before the optimizer"
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if group is not None and dist.get_world_size(group) > 1:
            return self.exchanging(trained, group, offload)
        groups = [(rule, part) for rule, part in self.groups(trained) if part]
        if offload is None or offload.optimizer is None:
            return Optimizer(trained, groups)
        return OffloadedOptimizer(trained, groups, offload)

    def exchanging(self, trained: list[Named], group: dist.ProcessGroup, offload: OffloadSection | None) -> Optimizer:
        """The optimizer of a method that reduces gradients, among several ranks."""
        raise NotImplementedError


def need(right: bool, problem: str) -> None:
    """Refuse an option; nan is refused too if the condition is one that nan does not meet."""
    if not right:
        raise ValueError(problem)
