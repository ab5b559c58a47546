"""Adam whose variance is updated ever more rarely, so that most steps are linear in the gradients (0/1 Adam).

    moesaic train recipes/tiny.yaml --out out/run "optimizer={name: zero_one_adam, lr: 3e-4, variance_double_every: 16}"

The paper (Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam) makes Adam linear so that workers
may exchange one bit per weight, and not at every step. The variance is updated at steps whose distance doubles after
every `variance_double_every` of them (the policy T_v), and is frozen between.

Built with a group of ranks, each with gradients of its own data, it exchanges in place of an all-reduce of gradients:

- Where the variance is updated, the gradients, at full precision. So momentum and variance are Adam's there.
- At other steps the momentum, at one bit per weight (`parallel/one_bit.py`).
- After `local_double_every` steps only at every 2nd step, after as many more at every 4th, up to every `local_limit`-th
  (the policy T_u). Between, each rank moves by its own momentum. What it moved by is what is exchanged: weights go back
  to where all ranks were equal and move by the mean; and the mean over those steps is the momentum from there on.

Policies then count steps, skipped ones too, so that no rank has to ask its device when to exchange. Between exchanges
weights differ by rank: `Optimizer.bring_together` before they are saved.

Three things are ours. Bias correction counts the updates of each moment by themselves, so that while the variance is
updated at each step this is Adam; `bias_correction: false` is the paper's form. A weight whose variance is still zero
(a rare token's embedding, an idle expert) takes its first gradient's square as its variance: a frozen zero would turn
that gradient into a step of any size. And scales of the compression are per block of weights, not per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.errors import UserError
from moesaic.parallel.one_bit import OneBitExchange
from moesaic.recipe_offload import OffloadSection
from moesaic.train.optimizers import Named, Optimizer, OptimizerMethod, Rule, Slot, Step, by_decay, need
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
    local_double_every: int = 32_768  # updates after which ranks take twice as many steps between exchanges
    local_limit: int = 16  # the most they take; 1: they exchange at every step, and need less memory

    reduces_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_adam(self.lr, self.betas, self.eps, self.weight_decay)
        for name in ("variance_double_every", "local_double_every", "local_limit"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")

    def groups(self, parameters: list[Named]) -> list[tuple[Rule, list[Named]]]:
        return [
            (ZeroOneAdamRule(self, decay), group)
            for decay, group in by_decay(parameters, self.weight_decay, self.decay_embeddings)
        ]

    def exchanging(self, trained: list[Named], group: dist.ProcessGroup, offload: OffloadSection | None) -> Optimizer:
        if offload is not None and offload.optimizer is not None:
            raise UserError("train.offload.optimizer", "is for one device, and 0/1 Adam is to exchange between ranks")
        exchange = OneBitExchange(group)
        groups = by_decay(trained, self.weight_decay, self.decay_embeddings)
        rules = [(ExchangingRule(self, decay, exchange), part) for decay, part in groups if part]
        return Optimizer(trained, rules, exchange)


@dataclass(frozen=True)
class ZeroOneAdamRule(Rule):
    options: ZeroOneAdam
    weight_decay: float

    optional: ClassVar[tuple[str, ...]] = ("worker_error",)

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
        moved = momentum.lerp(gradient, 1 - beta1)
        frozen = torch.where(variance == 0, square * correction2, variance)
        scale = torch.where(due, variance.lerp(square, 1 - beta2), frozen)
        step.keep(momentum, moved)
        step.keep(variance, scale)

        denominator = scale.sqrt().div_(correction2.sqrt()).add_(self.options.eps)
        new = weight * (1 - lr * self.weight_decay)
        new.sub_(moved.div(denominator).mul_(lr / correction1))
        step.keep(weight, new)

    def _correction(self, beta: float, count: Tensor) -> Tensor:
        """What a moment of `count` updates is divided by; float64, since one less a beta keeps few float32 digits."""
        exact = count.double()
        return 1 - beta**exact if self.options.bias_correction else torch.ones_like(exact)


@dataclass(frozen=True)
class ExchangingRule(ZeroOneAdamRule):
    """The same on several ranks. `moved` sums what a rank moved by since the last exchange, before it is divided by the
    root of the variance; `rates` sums the learning rates of those steps, `decay` logarithms of their weight decay."""

    exchange: OneBitExchange

    unsaved: ClassVar[tuple[str, ...]] = ("server_error", "anchor", "moved", "rates", "decay")

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        state = super().start(weight)
        state["worker_error"] = torch.zeros_like(weight)
        state["server_error"] = weight.new_zeros(self.exchange.chunk(weight.numel()))
        if self.options.local_limit > 1:
            state["anchor"] = torch.zeros_like(weight)  # the weight after the last exchange
            state["moved"] = torch.zeros_like(weight)
            state["rates"] = torch.zeros((), dtype=torch.float64, device=weight.device)
            state["decay"] = torch.zeros((), dtype=torch.float64, device=weight.device)
        return state

    def update(self, slots: Sequence[Slot], gradients: Sequence[Tensor], step: Step) -> None:
        of = dict(zip((slot.name for slot in slots), gradients, strict=True))
        due = bool(variance_due(torch.tensor(step.number), self.options.variance_double_every))
        every = local_steps(step.number, self.options.local_double_every, self.options.local_limit)
        for part in _parts(slots):
            own = [of[slot.name].view(-1) / step.divisor for slot in part]
            if due:
                own = self.exchange.full_mean(own)
            momenta = [
                _flat(slot, "momentum").lerp(g, 1 - self.options.betas[0]) for slot, g in zip(part, own, strict=True)
            ]
            counts = [(slot.state["step"] + 1, slot.state["variance_step"] + due) for slot in part]
            if due:
                for slot, gradient in zip(part, own, strict=True):
                    variance = _flat(slot, "variance")
                    step.keep(variance, variance.lerp(gradient.square(), 1 - self.options.betas[1]))
            for slot, (updates, variance_updates) in zip(part, counts, strict=True):
                step.keep(slot.state["step"], updates)
                step.keep(slot.state["variance_step"], variance_updates)
            if every == 1:
                self._move_together(part, momenta, step, exchanged=due)
            else:
                self._move_alone(part, momenta, step)
                if due or (step.number + 1) % every == 0:
                    self._gather(part, step.skip)

    def bring_together(self, slots: Sequence[Slot], number: int) -> None:
        """What compression has lost so far is brought together too, so that all state is the same on all ranks, and
        others than these can resume from it: every rank then holds the mean of what is to be made up for."""
        for part in _parts(slots):
            if local_steps(number, self.options.local_double_every, self.options.local_limit) > 1:
                self._gather(part, torch.zeros((), dtype=torch.bool, device=part[0].weight.device))
            own = [_flat(slot, "worker_error").clone() for slot in part]
            for slot, error in zip(part, own, strict=True):
                chunk = self.exchange.own_chunk(error)
                chunk.add_(_flat(slot, "server_error")[: len(chunk)], alpha=self.exchange.ranks)
            for slot, error in zip(part, self.exchange.full_mean(own), strict=True):
                _flat(slot, "worker_error").copy_(error)
                _flat(slot, "server_error").zero_()

    def _move_together(self, part: list[Slot], momenta: list[Tensor], step: Step, exchanged: bool) -> None:
        """A step of all ranks."""
        if not exchanged:
            momenta = self._mean(part, momenta, step.skip)
        lr = self.options.lr * step.lr_factor
        for slot, momentum in zip(part, momenta, strict=True):
            step.keep(_flat(slot, "momentum"), momentum)
            weight = slot.weight.detach().view(-1)
            moved = momentum / self._denominator(slot, momentum, step.skip) * self._rate(slot, lr)
            step.keep(weight, weight * (1 - lr * self.weight_decay) - moved)

    def _move_alone(self, part: list[Slot], momenta: list[Tensor], step: Step) -> None:
        """A step of this rank. A weight without variance waits for the exchange, which gives it one that all share."""
        lr = self.options.lr * step.lr_factor
        for slot, momentum in zip(part, momenta, strict=True):
            state, weight = slot.state, slot.weight.detach().view(-1)
            rate = self._rate(slot, lr).clamp(min=1e-20)  # momenta of steps that move nothing have a mean too
            first = state["rates"] == 0
            step.keep(_flat(slot, "anchor"), torch.where(first, weight, _flat(slot, "anchor")))
            step.keep(_flat(slot, "moved"), _flat(slot, "moved") + momentum * rate)
            step.keep(state["rates"], state["rates"] + rate)
            step.keep(state["decay"], state["decay"] + math.log1p(-lr * self.weight_decay))
            step.keep(_flat(slot, "momentum"), momentum)
            moved = torch.where(_flat(slot, "variance") == 0, 0.0, momentum / self._root(slot)) * rate
            step.keep(weight, weight * (1 - lr * self.weight_decay) - moved)

    def _gather(self, part: list[Slot], skip: Tensor) -> None:
        """Replace what ranks moved by since they were last equal by its mean."""
        # All slots have taken the same steps. If there are none, or the step is skipped, everything stays as it is.
        skip = skip | (part[0].state["rates"] == 0)
        rates = [slot.state["rates"].clamp(min=1e-30) for slot in part]
        own = [_flat(slot, "moved") / rate for slot, rate in zip(part, rates, strict=True)]
        momenta = self._mean(part, [tensor.float() for tensor in own], skip)
        for slot, momentum, rate in zip(part, momenta, rates, strict=True):
            state, weight = slot.state, slot.weight.detach().view(-1)
            moved = momentum / self._denominator(slot, momentum, skip) * rate
            _keep(skip, weight, _flat(slot, "anchor") * state["decay"].exp() - moved)
            _keep(skip, _flat(slot, "momentum"), momentum)
            for name in ("anchor", "moved", "rates", "decay"):
                _keep(skip, state[name], torch.zeros_like(state[name]))

    def _mean(self, part: list[Slot], momenta: list[Tensor], skip: Tensor) -> list[Tensor]:
        errors = [[_flat(slot, name) for slot in part] for name in ("worker_error", "server_error")]
        means, *left = self.exchange.mean(momenta, *errors)
        for olds, news in zip(errors, left, strict=True):
            for old, new in zip(olds, news, strict=True):
                _keep(skip, old, new)
        return means

    def _denominator(self, slot: Slot, momentum: Tensor, skip: Tensor) -> Tensor:
        """What a momentum that all ranks share is divided by; it gives a weight its variance, if that is zero."""
        variance = _flat(slot, "variance")
        first = (momentum / (1 - self.options.betas[0])).square() * self._variance_correction(slot)
        _keep(skip, variance, torch.where(variance == 0, first.float(), variance))
        return self._root(slot)

    def _root(self, slot: Slot) -> Tensor:
        root = _flat(slot, "variance").sqrt()
        return root.div_(self._variance_correction(slot).sqrt()).add_(self.options.eps)

    def _variance_correction(self, slot: Slot) -> Tensor:
        return self._correction(self.options.betas[1], slot.state["variance_step"].clamp(min=1))

    def _rate(self, slot: Slot, lr: float) -> Tensor:
        return lr / self._correction(self.options.betas[0], slot.state["step"].clamp(min=1))


def _flat(slot: Slot, name: str) -> Tensor:
    return slot.state[name].view(-1)


def _keep(skip: Tensor, old: Tensor, new: Tensor) -> None:
    torch.where(skip, old, new.to(old.dtype), out=old)


def _parts(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots in groups of up to PIECE weights, which are exchanged by one message."""
    part: list[Slot] = []
    for slot in slots:
        if part and sum(other.weight.numel() for other in part) + slot.weight.numel() > PIECE:
            yield part
            part = []
        part.append(slot)
    if part:
        yield part


def variance_due(updates: Tensor, double_every: int) -> Tensor:
    """Whether the variance is updated at the step after `updates` others: at `double_every` steps one apart, then at as
    many two apart, then four. The distance is 2^b from step double_every * (2^b - 1) on, so nothing is remembered."""
    doublings = torch.frexp((updates // double_every + 1).double()).exponent - 1
    distance = torch.ones_like(updates) << doublings
    return (updates - double_every * (distance - 1)) % distance == 0


def local_steps(number: int, double_every: int, limit: int) -> int:
    """How many steps there are from one exchange to the next, after `number` steps: 1, then 2, 4, up to `limit`."""
    return min(1 << min(number // double_every, 62), limit)
