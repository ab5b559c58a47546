"""An optimizer whose float32 weights and states are on the host, or in files (ZeRO-Offload, SuperOffload).

The device holds parameters, activations and gradients. While the backward pass runs, gradients are copied to the host
in buckets, in the order in which they become complete, as far as there are buffers; others follow in the step. The
rules update the host's weights a bucket at a time, and the device gets them back rounded to its type while the next
bucket is updated. On the host the arithmetic is that of `Optimizer` on a CPU: the same bits.

With `on_device` the state of the first layers stays on the device, as much as fits into that, and the device updates
them while the host updates the others: their gradients come last, and would only be waited for.

A step must know the norm of all gradients before it updates the first weight. Two ways not to wait for it:

- `speculative`: update a bucket during the backward pass as if nothing had to be clipped, and keep a copy of what was
  there. If the norm says otherwise, everything is put back, and updated again. The result is the same, to the bit.
- `delay`: update everything while the next step computes, which therefore sees the weights of one update ago. The
  result differs; ZeRO-Offload finds that it learns as well once the first steps are over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.parallel.offload.host_memory import HostMemory
from moesaic.parallel.offload.staging import Buffer, Staging, aligned, cheaper_side
from moesaic.recipe_offload import CPU, OffloadSection
from moesaic.sharded import local
from moesaic.train.optimizers._optimizer import Named, Optimizer, Rule, Slot, Step, StepResult

BUCKET = 2**25  # weights, or one parameter if it has more
BUFFERS = 4  # besides those that speculation holds until the norm is known


@dataclass
class Bucket:
    """Slots whose gradients travel together, with their rules."""

    slots: list[tuple[Rule, Slot]]
    undo: list[Tensor] | None = None  # room for a copy of all tensors, if it may be updated before the norm is known
    missing: set[str] = field(default_factory=set)  # whose gradients are not complete yet
    present: list[tuple[Rule, Slot]] = field(default_factory=list)  # those with a gradient in this step
    gradients: list[Tensor] = field(default_factory=list)  # theirs, as long as they are on the device
    buffer: Buffer | None = None  # or where they are on the host
    speculation: Future[None] | None = None

    def tensors(self) -> Iterator[Tensor]:
        for _, slot in self.slots:
            yield slot.weight
            yield from slot.state.values()


class OffloadedOptimizer(Optimizer):
    """`expect` must be called before the first backward pass of a step that has several, or that speculates."""

    def __init__(
        self, parameters: Sequence[Named], groups: Sequence[tuple[Rule, Sequence[Named]]], settings: OffloadSection
    ) -> None:
        assert settings.optimizer is not None
        self.settings = settings
        self.memory = HostMemory(None if settings.optimizer == CPU else Path(settings.optimizer))
        self._stays = _fitting(parameters, int(settings.on_device * 2**30))
        super().__init__(parameters, groups)
        self._device = self.updates.device
        self.updates, self.skipped = self.updates.cpu(), self.skipped.cpu()
        self._here = [(rule, [slot for slot in slots if slot.name in self._stays]) for rule, slots in self.groups]
        away = [(rule, [slot for slot in slots if slot.name not in self._stays]) for rule, slots in self.groups]
        self.buckets = list(_buckets(away, {slot.name: number for number, slot in enumerate(self.slots)}))
        self._of = {slot.name: bucket for bucket in self.buckets for _, slot in bucket.slots}
        self.rollbacks = 0
        self._allow_undo(int(settings.speculative * 2**30))
        cast = cheaper_side(self._device) if settings.cast == "auto" else settings.cast
        wide = 4 if cast == "device" else 2
        size = max(
            sum(aligned(slot.own.numel() * max(wide, slot.own.element_size())) for _, slot in bucket.slots)
            for bucket in self.buckets
        )
        speculating = sum(bucket.undo is not None for bucket in self.buckets)
        self.staging = Staging(self._device, size, min(BUFFERS + speculating, len(self.buckets)), cast)
        largest = max(sum(slot.weight.numel() for _, slot in bucket.slots) for bucket in self.buckets)
        self._float32 = torch.empty(largest)  # a bucket's gradients, as the rules want them
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._delayed: Future[None] | None = None  # the delayed one
        self._norms: dict[str, Tensor] = {}
        self._backwards = 1
        self._lr_factor: float | None = None  # of the next step, if it is known
        self._left: dict[str, int] = {}  # backward passes that are yet to come
        self._begin()
        # Parameters may outlive this, and need not keep it.
        arrived: weakref.WeakMethod[Callable[[Slot], None]] = weakref.WeakMethod(self._arrived)
        for slot in self.slots:
            if slot.name in self._of:
                slot.parameter.register_post_accumulate_grad_hook(_hook(arrived, slot))

    # -- the backward pass

    def expect(self, backwards: int, lr_factor: float) -> None:
        self._backwards, self._lr_factor = backwards, lr_factor
        self._begin()

    def _begin(self) -> None:
        self._left = dict.fromkeys(self._of, self._backwards)
        for bucket in self.buckets:
            bucket.missing = {slot.name for _, slot in bucket.slots}

    @torch.no_grad()
    def _arrived(self, slot: Slot) -> None:
        """A backward pass has added to a gradient."""
        self._left[slot.name] -= 1
        if self._left[slot.name] > 0 or self.settings.delay:
            return
        bucket = self._of[slot.name]
        assert bucket.buffer is None, f"a further backward pass reached {slot.name}; say so to expect()"
        bucket.missing.discard(slot.name)
        if not bucket.missing and (buffer := self.staging.take(wait=False)) is not None:
            self._collect(bucket)
            self._fetch(bucket, buffer, self.staging.now())
            if bucket.undo is not None and self._lr_factor is not None:
                bucket.speculation = self._worker.submit(self._speculate, bucket, self._lr_factor)

    def _collect(self, bucket: Bucket) -> None:
        """Take a bucket's gradients over from their parameters, and note their norms."""
        bucket.present = [(rule, slot) for rule, slot in bucket.slots if slot.parameter.grad is not None]
        for _, slot in bucket.present:
            gradient = slot.parameter.grad
            assert gradient is not None
            bucket.gradients.append(gradient)
            slot.parameter.grad = None
        self._note_norms([slot for _, slot in bucket.present], bucket.gradients)

    def _note_norms(self, slots: Sequence[Slot], gradients: list[Tensor]) -> None:
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32) if gradients else ()
        self._norms |= {slot.name: norm for slot, norm in zip(slots, norms, strict=True)}

    def _fetch(self, bucket: Bucket, buffer: Buffer, complete: torch.cuda.Event | None) -> None:
        self.staging.fetch(buffer, bucket.gradients, complete)
        bucket.buffer, bucket.gradients = buffer, []

    # -- speculation

    def _allow_undo(self, left: int) -> None:
        """Let the first buckets of the backward pass speculate, as many as memory is given for."""
        for bucket in self.buckets:
            left -= sum(tensor.numel() * tensor.element_size() for tensor in bucket.tensors())
            if left < 0:
                return
            bucket.undo = [torch.empty_like(tensor) for tensor in bucket.tensors()]

    @torch.no_grad()
    def _speculate(self, bucket: Bucket, lr_factor: float) -> None:
        assert bucket.undo is not None
        for room, tensor in zip(bucket.undo, bucket.tensors(), strict=True):
            room.copy_(tensor)
        self._rules(
            bucket, Step(lr_factor, torch.ones(()), torch.zeros((), dtype=torch.bool), self.updates, self.number)
        )

    def _resolve(self, right: bool) -> None:
        """The norm is known: keep what was speculated if that was right, or put everything back."""
        for bucket in self.buckets:
            if bucket.speculation is None:
                continue
            bucket.speculation.result()
            if not right:
                assert bucket.undo is not None
                for room, tensor in zip(bucket.undo, bucket.tensors(), strict=True):
                    tensor.copy_(room)
                bucket.speculation = None
                self.rollbacks += 1

    # -- the step

    @torch.no_grad()
    def step(self, lr_factor: float, *, clip: float, loss_scale: Tensor | None = None) -> StepResult:
        assert clip > 0, f"clip at {clip}"
        self._finish_delayed()
        for bucket in self.buckets:
            if bucket.buffer is None:
                self._collect(bucket)
        here = [slot for _, slots in self._here for slot in slots if slot.parameter.grad is not None]
        self._note_norms(here, [slot.parameter.grad for slot in here if slot.parameter.grad is not None])
        # In the order of the parameters, whatever the buckets: a sum's bits depend on its order.
        norms = [self._norms[slot.name] for slot in self.slots if slot.name in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self._device)
        divisor = torch.ones_like(norm) if loss_scale is None else loss_scale.to(norm)
        norm = norm / divisor
        skip = ~norm.isfinite()
        divisor = divisor * (norm / clip).clamp(min=1.0)
        skipped, on_host, complete = bool(skip), divisor.cpu(), self.staging.now()  # waits for the backward pass
        self._resolve(right=not skipped and float(on_host) == 1.0 and lr_factor == self._lr_factor)
        # The device begins its own share, and the host does the other beside it.
        self._update(self._here, Step(lr_factor, divisor, skip, self.updates.to(self._device), self.number))
        step = Step(lr_factor, on_host, torch.zeros((), dtype=torch.bool), self.updates.clone(), self.number)
        if skipped:
            self._release()
        elif self.settings.delay:
            self._delayed = self._worker.submit(self._apply, step, complete)
        else:
            self._apply(step, complete)
            self.staging.settle()
        self._norms = {}
        self.updates += not skipped
        self.skipped += skipped
        self.number += 1
        self._lr_factor = None
        self._begin()
        return StepResult(norm, skip, self.updates.clone())

    @torch.no_grad()
    def _apply(self, step: Step, complete: torch.cuda.Event | None) -> None:
        """Update all that has a gradient: first what is on the host already, whose buffers the others need.

        Gradients on the device are `complete`; what it has computed since does not matter."""
        waiting = [bucket for bucket in self.buckets if bucket.present]
        waiting.sort(key=lambda bucket: bucket.buffer is None)
        for number, bucket in enumerate(waiting):
            if bucket.buffer is None:
                self._fetch(bucket, _given(self.staging.take()), complete)
            for later in waiting[number + 1 :]:  # they travel while this one is updated
                if later.buffer is None:
                    if (buffer := self.staging.take(wait=False)) is None:
                        break
                    self._fetch(later, buffer, complete)
            if number + 1 < len(waiting):
                self.memory.prefetch(waiting[number + 1].tensors())
            if bucket.speculation is None:
                self._rules(bucket, step)
            buffer, present = _given(bucket.buffer), bucket.present
            bucket.buffer, bucket.present, bucket.speculation = None, [], None
            if self.settings.delay:
                self.staging.give(buffer)
            else:
                self._send(buffer, [slot for _, slot in present])

    def _rules(self, bucket: Bucket, step: Step) -> None:
        """Update the weights of a bucket from the gradients in its buffer."""
        gradients, at = [], 0
        for view in _given(bucket.buffer).wait():
            wide = view
            if view.dtype != torch.float32 or bucket.undo is not None:  # rules may overwrite what is yet needed
                wide = self._float32[at : at + view.numel()].view(view.shape).copy_(view)
                at += view.numel()
            gradients.append(wide)
        for rule in dict.fromkeys(rule for rule, _ in bucket.present):
            chosen = [number for number, (other, _) in enumerate(bucket.present) if other is rule]
            rule.update(
                [bucket.present[number][1] for number in chosen], [gradients[number] for number in chosen], step
            )

    def _send(self, buffer: Buffer, slots: Sequence[Slot]) -> None:
        self.staging.send(buffer, [slot.weight for slot in slots], [slot.own.detach() for slot in slots])

    def _release(self) -> None:
        """Let go of gradients that nobody will use."""
        for bucket in self.buckets:
            if bucket.buffer is not None:
                bucket.buffer.wait()
                self.staging.give(bucket.buffer)
            bucket.buffer, bucket.gradients, bucket.present, bucket.speculation = None, [], [], None

    @torch.no_grad()
    def _finish_delayed(self) -> None:
        """Wait for the update that is under way, and give the device its weights."""
        if self._delayed is not None:
            update, self._delayed = self._delayed, None
            update.result()
            for bucket in self.buckets:
                self._send(_given(self.staging.take()), [slot for _, slot in bucket.slots])
            self.staging.settle()

    def zero_grad(self) -> None:
        super().zero_grad()
        if self._norms:  # a backward pass without a step
            self._resolve(right=False)
            self._release()
            self._norms = {}
        self._lr_factor = None
        self._begin()

    # -- state

    def bring_together(self) -> None:
        self._finish_delayed()

    @property
    def device(self) -> torch.device:
        return self._device

    def state_dict(self) -> dict[str, Tensor]:
        if self._delayed is not None:
            self._delayed.result()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._finish_delayed()
        super().load_state_dict(tensors)
        for slot in self.slots:
            if not slot.has_master:  # the model has loaded its own
                slot.weight.copy_(slot.own)

    def _slot(self, rule: Rule, name: str, parameter: nn.Parameter) -> Slot:
        if local(parameter) is not parameter:
            raise UserError("train.offload.optimizer", "is for one device", "Leave it out, or train on one rank.")
        if name in self._stays:
            return super()._slot(rule, name, parameter)
        assert parameter.is_contiguous(), f"{name} is not contiguous"
        weight = self.memory.copy(parameter.detach(), torch.float32)
        state = {key: self.memory.keep(tensor) for key, tensor in rule.start(weight).items()}
        return Slot(name, parameter, parameter, weight, state)


def _fitting(parameters: Sequence[Named], size: int) -> set[str]:
    """The first parameters whose float32 weights and two moments fit into so many bytes; at least one is offloaded."""
    names: set[str] = set()
    for name, parameter in parameters[:-1]:
        size -= parameter.numel() * (8 if parameter.dtype == torch.float32 else 12)
        if size < 0:
            break
        names.add(name)
    return names


def _buckets(groups: Sequence[tuple[Rule, Sequence[Slot]]], order: dict[str, int]) -> Iterator[Bucket]:
    """From the last parameter to the first, which is about how the backward pass completes them."""
    every = [(rule, slot) for rule, slots in groups for slot in slots]
    slots: list[tuple[Rule, Slot]] = []
    for rule, slot in sorted(every, key=lambda one: -order[one[1].name]):
        if slots and sum(other.weight.numel() for _, other in slots) + slot.weight.numel() > BUCKET:
            yield Bucket(slots)
            slots = []
        slots.append((rule, slot))
    yield Bucket(slots)


def _hook(arrived: weakref.WeakMethod[Callable[[Slot], None]], slot: Slot) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if (method := arrived()) is not None:
            method(slot)

    return hook


def _given(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer
