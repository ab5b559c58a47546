"""What every optimizer does around its update rules: master weights, gradient norm, clipping, skipped steps, state.

Nothing here, nor in a rule, reads a value from the device: whether a step is skipped is decided on the device, so the
host never waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.parallel.one_bit import OneBitExchange
from moesaic.sharded import local, whole

Named = tuple[str, nn.Parameter]

# Float32 copies of this many elements are in memory at a time while gradients of a smaller type are applied.
PIECE = 2**26


@dataclass(frozen=True)
class Slot:
    """A parameter, what of it lies on this rank, the float32 weight that is updated for that (itself, or its master),
    and the rule's state for it."""

    name: str
    parameter: nn.Parameter
    own: Tensor
    weight: Tensor
    state: dict[str, Tensor]

    @property
    def has_master(self) -> bool:
        return self.weight.dtype != self.own.dtype

    def write(self, weight: Tensor) -> None:
        """Put another weight in its place."""
        self.weight.data.copy_(weight)
        if self.has_master:
            self.own.data.copy_(weight)

    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return local(self.parameter.grad).to(self.weight.dtype).contiguous()


@dataclass(frozen=True)
class Step:
    """A step, as a rule sees it. The tensors are scalars on the weights' device."""

    lr_factor: float
    divisor: Tensor  # float32: a gradient divided by it is unscaled and clipped
    skip: Tensor  # bool: leave everything as it is, to the bit; the gradients are not finite
    updates: Tensor  # int64: how many updates were taken before this one
    number: int  # how many steps were taken before this one, skipped ones too: what the host knows without asking

    def keep(self, old: Tensor, new: Tensor) -> None:
        """Write `new` over `old`, unless the step is skipped."""
        torch.where(self.skip, old, new, out=old)


class Rule:
    """How weights are updated. A rule holds options alone; its state for a weight is in that weight's slot."""

    unsaved: ClassVar[tuple[str, ...]] = ()  # state that is zero once parameters are brought together
    optional: ClassVar[tuple[str, ...]] = ()  # state that zeros may stand in for, or that may be dropped, in loading

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """The state of a weight before its first update."""
        raise NotImplementedError

    def update(self, slots: Sequence[Slot], gradients: Sequence[Tensor], step: Step) -> None:
        """Update the slots' weights and states. The gradients are as they came, float32, and may be overwritten."""
        raise NotImplementedError

    def bring_together(self, slots: Sequence[Slot], number: int) -> None:
        """Make the weights equal on all ranks, after `number` steps, if this rule lets them differ between steps."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step. The tensors are scalars and stay on the device: reading one makes the host wait."""

    norm: Tensor  # float32: of all gradients together, unscaled, before clipping
    skipped: Tensor  # bool: the norm was not finite, and nothing but the count of skipped steps has changed
    updates: Tensor  # int64: updates taken so far


class Optimizer:
    """Updates parameters from their gradients. `method.build(named_parameters)` makes one.

    A bfloat16 or float16 parameter has a float32 master, which is what is updated; the parameter is its rounding to
    nearest. Whoever changes such a parameter elsewhere must load a state too, or the next step undoes the change.

    With an `exchange`, gradients are this rank's shares, whose sum over the ranks is the gradient, and it is the rules
    that bring them together. All ranks clip by the root mean square of what each takes the norm to be, which is never
    below the true norm, and skip together.
    """

    def __init__(
        self,
        parameters: Sequence[Named],
        groups: Sequence[tuple[Rule, Sequence[Named]]],
        exchange: OneBitExchange | None = None,
    ) -> None:
        if not parameters:
            raise UserError("optimizer", "no parameter takes a gradient, so there is nothing to train")
        assert len({name for name, _ in parameters}) == len(parameters), "two parameters have one name"
        assert len({parameter for _, parameter in parameters}) == len(parameters), "a parameter is given twice"
        assert len({parameter.device for _, parameter in parameters}) == 1, "parameters on several devices"
        self.groups = [
            (rule, [self._slot(rule, name, parameter) for name, parameter in group]) for rule, group in groups
        ]
        of = {slot.name: slot for _, slots in self.groups for slot in slots}
        assert sum(len(slots) for _, slots in self.groups) == len(of) == len(parameters), "not one rule for each"
        # In the order given, whatever the rules: the norm is a sum, and a sum's bits depend on its order.
        self.slots = [of[name] for name, _ in parameters]
        device = self.slots[0].parameter.device
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.number = 0
        self.exchange = exchange

    @torch.no_grad()
    def step(self, lr_factor: float, *, clip: float, loss_scale: Tensor | None = None) -> StepResult:
        """Update from the gradients in `.grad`, which are used up: their values afterwards mean nothing.

        A parameter whose gradient is None is left alone, with its state. Gradients are divided by `loss_scale`, then
        scaled down to a norm of `clip` (infinity: never) if theirs is larger. If the norm is not finite, the step is
        skipped: parameters, states and counts stay as they are to the bit, and one more step is counted as skipped.
        """
        assert clip > 0, f"clip at {clip}"
        ranks = 1
        if self.exchange is not None:
            ranks = self.exchange.ranks
            for slot in self.slots:  # all ranks must exchange the same, whoever has no gradient of it
                if slot.parameter.grad is None:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
        norm = self.norm()
        divisor = torch.ones_like(norm) if loss_scale is None else loss_scale.to(norm)
        norm = norm / divisor
        skip = ~norm.isfinite()
        step = Step(lr_factor, divisor * (norm / clip).clamp(min=1.0) / ranks, skip, self.updates, self.number)
        self._update(self.groups, step)
        self.updates += ~skip
        self.skipped += skip
        self.number += 1
        return StepResult(norm, skip, self.updates.clone())

    def _update(self, groups: Sequence[tuple[Rule, Sequence[Slot]]], step: Step) -> None:
        for rule, slots in groups:
            for piece in _pieces([slot for slot in slots if slot.parameter.grad is not None]):
                rule.update(piece, [slot.gradient() for slot in piece], step)
                for slot in piece:
                    if slot.has_master:
                        slot.own.copy_(slot.weight)

    def expect(self, backwards: int, lr_factor: float) -> None:
        """Before the forward pass: how many backward passes the next step's gradients come from, and its learning rate.
        Who begins before `step` needs to know."""

    @torch.no_grad()
    def bring_together(self) -> None:
        """Make parameters what the updates so far say, and equal on all ranks: before they are saved, and at the end.
        All ranks must ask."""
        for rule, slots in self.groups:
            rule.bring_together(slots, self.number)
        for slot in self.slots:
            if slot.has_master and self.exchange is not None:
                slot.own.copy_(slot.weight)

    def norm(self) -> Tensor:
        """Of all gradients together; a run on many ranks puts its own here, which counts every element once."""
        norm = total_norm([slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None], self.device)
        if self.exchange is None:
            return norm
        return (self.exchange.sum(norm.double().square()) * self.exchange.ranks).sqrt().float()

    def zero_grad(self) -> None:
        for slot in self.slots:
            slot.parameter.grad = None

    @property
    def device(self) -> torch.device:
        return self.updates.device

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the next step depends on but the parameters: the tensors themselves, so copy them before it.

        Between ranks whose parameters differ, that is so once they are brought together.
        """
        tensors = {"updates": self.updates, "skipped": self.skipped}
        unsaved = {slot.name: rule.unsaved for rule, slots in self.groups for slot in slots}
        for slot in self.slots:
            for key, tensor in slot.state.items():
                if key not in unsaved[slot.name]:
                    tensors[f"{slot.name}/{key}"] = tensor
            if slot.has_master:
                tensors[f"{slot.name}/master"] = slot.weight
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from a saved state. It must fit to the last tensor, or nothing is changed.

        A parameter that has a master is set from it; the others are the model's to load.
        """
        own = self.state_dict()
        optional = {f"{slot.name}/{key}" for rule, slots in self.groups for slot in slots for key in rule.optional}
        tensors = {key: tensor for key, tensor in tensors.items() if key in own or key not in optional}
        tensors |= {key: torch.zeros_like(own[key]) for key in optional & own.keys() - tensors.keys()}
        _check(own, tensors)
        for key, tensor in own.items():
            tensor.copy_(tensors[key])
        for rule, slots in self.groups:
            for slot in slots:
                for key in slot.state.keys() & set(rule.unsaved):
                    slot.state[key].zero_()
        self.number = int(self.updates + self.skipped)
        for slot in self.slots:
            if slot.has_master:
                slot.own.copy_(slot.weight)

    def _slot(self, rule: Rule, name: str, parameter: nn.Parameter) -> Slot:
        own = local(parameter)
        own = own if own is parameter else own.detach()
        assert own.is_contiguous(), f"{name} is not contiguous"
        if parameter.dtype == torch.float32:
            weight = own
        else:
            assert parameter.dtype in (torch.bfloat16, torch.float16), f"{name} is {parameter.dtype}"
            weight = own.detach().float()
        return Slot(name, parameter, own, weight, rule.start(weight.detach()))


def total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The Euclidean norm of all gradients together, accumulated in float32 whatever their type."""
    if not gradients:
        return torch.zeros((), device=device)
    if any(local(gradient) is not gradient for gradient in gradients):  # of every parameter over its own ranks
        norms = [whole(torch.linalg.vector_norm(gradient, dtype=torch.float32)) for gradient in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)))


def _pieces(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots in groups whose gradients' float32 copies fit into PIECE elements; a float32 gradient needs no copy."""
    piece: list[Slot] = []
    left = PIECE
    for slot in slots:
        copied = slot.weight.numel() if slot.has_master else 0
        if piece and copied > left:
            yield piece
            piece, left = [], PIECE
        piece.append(slot)
        left -= copied
    if piece:
        yield piece


def _check(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    remedy = "The state is of another model, type of weights or optimizer: resume with the recipe that made it."
    for key, tensor in own.items():
        if key not in found:
            raise UserError("optimizer state", f"{key} is missing", remedy)
        if found[key].shape != tensor.shape or found[key].dtype != tensor.dtype:
            expected, got = (f"{str(of.dtype).removeprefix('torch.')} {list(of.shape)}" for of in (tensor, found[key]))
            raise UserError("optimizer state", f"{key} is {got}, and must be {expected}", remedy)
    for key in found:
        if key not in own:
            raise UserError("optimizer state", f"{key} belongs to nothing here", remedy)
