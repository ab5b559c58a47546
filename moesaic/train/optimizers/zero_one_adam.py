"""Adam whose variance is updated ever more rarely, so that most steps are linear in the gradients (0/1 Adam).

    moesaic train recipes/tiny.yaml --out out/run "optimizer={name: zero_one_adam, lr: 3e-4, variance_double_every: 16}"

The paper (Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam) makes Adam linear so that workers
may exchange one bit per weight, and not at every step. Here is what one process does. The variance is updated at steps
whose distance doubles after every `variance_double_every` of them (the policy T_v), and is frozen between. The momentum
is what processes will exchange, compressed to one bit with error feedback; that comes with the parallel trainer, at
`ZeroOneAdamRule.exchange`. Until then every step communicates, with itself, and the policy of local steps T_u (as many
as `local_limit` of them between exchanges, doubling every `local_double_every` updates) is recorded and not used.

Two things are ours. Bias correction counts the updates of each moment by themselves, so that while the variance is
updated at each step this is Adam; `bias_correction: false` is the paper's form. And a weight whose variance is still
zero (a rare token's embedding, an idle expert) takes its first gradient's square as its variance: a frozen zero would
turn that gradient into a step of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.train.optimizers import Named, OptimizerMethod, Rule, Slot, Step, by_decay, need
from moesaic.train.optimizers.adamw import check_adam

# So many weights are updated at a time, to bound the memory of what is computed on the way.
PIECE = 2**26


@dataclass(frozen=True)
class ZeroOneAdam(OptimizerMethod):
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = True
    bias_correction: bool = True
    variance_double_every: int = 16
    local_double_every: int = 32_768
    local_limit: int = 16

    def __post_init__(self) -> None:
        check_adam(self.lr, self.betas, self.eps, self.weight_decay)
        for name in ("variance_double_every", "local_double_every", "local_limit"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")

    def groups(self, parameters: list[Named]) -> list[tuple[Rule, list[Named]]]:
        return [
            (ZeroOneAdamRule(self, decay), group)
            for decay, group in by_decay(parameters, self.weight_decay, self.decay_embeddings)
        ]


@dataclass(frozen=True)
class ZeroOneAdamRule(Rule):
    options: ZeroOneAdam
    weight_decay: float

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.int64, device=weight.device),
            "variance_step": torch.zeros((), dtype=torch.int64, device=weight.device),
            "momentum": torch.zeros_like(weight),
            "variance": torch.zeros_like(weight),
        }

    def update(self, slots: Sequence[Slot], gradients: Sequence[Tensor], step: Step) -> None:
        policy = variance_due(step.updates, self.options.variance_double_every)
        for slot, gradient in zip(slots, gradients, strict=True):
            state = slot.state
            due = policy | (state["variance_step"] == 0)  # a weight's first gradient, whenever it comes
            counts = state["step"] + 1, state["variance_step"] + due
            flat = [tensor.view(-1) for tensor in (slot.weight, state["momentum"], state["variance"], gradient)]
            for weight, momentum, variance, part in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
                self._update(weight, momentum, variance, part / step.divisor, due, counts, step)
            step.keep(state["step"], counts[0])
            step.keep(state["variance_step"], counts[1])

    def _update(
        self,
        weight: Tensor,
        momentum: Tensor,
        variance: Tensor,
        gradient: Tensor,
        due: Tensor,
        counts: tuple[Tensor, Tensor],
        step: Step,
    ) -> None:
        (beta1, beta2), lr = self.options.betas, self.options.lr * step.lr_factor
        correction1, correction2 = self._correction(beta1, counts[0]), self._correction(beta2, counts[1])
        square = gradient.square()
        moved = self.exchange(momentum.lerp(gradient, 1 - beta1))
        frozen = torch.where(variance == 0, square * correction2, variance)
        scale = torch.where(due, variance.lerp(square, 1 - beta2), frozen)
        step.keep(momentum, moved)
        step.keep(variance, scale)

        denominator = scale.sqrt().div_(correction2.sqrt()).add_(self.options.eps)
        new = weight * (1 - lr * self.weight_decay)
        new.sub_(moved.div(denominator).mul_(lr / correction1))
        step.keep(weight, new)

    def exchange(self, momentum: Tensor) -> Tensor:
        """The mean of all processes' momenta; the only communication while the variance is frozen.

        There is one process so far.
        """
        return momentum

    def _correction(self, beta: float, count: Tensor) -> Tensor:
        """What a moment of `count` updates is divided by; float64, since one less a beta keeps few float32 digits."""
        exact = count.double()
        return 1 - beta**exact if self.options.bias_correction else torch.ones_like(exact)


def variance_due(updates: Tensor, double_every: int) -> Tensor:
    """Whether the variance is updated at the step after `updates` others: at `double_every` steps one apart, then at as
    many two apart, then four. The distance is 2^b from step double_every * (2^b - 1) on, so nothing is remembered."""
    doublings = torch.frexp((updates // double_every + 1).double()).exponent - 1
    distance = torch.ones_like(updates) << doublings
    return (updates - double_every * (distance - 1)) % distance == 0
