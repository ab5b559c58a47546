"""Activations that wait on the host for the backward pass.

    offload = ActivationOffload(model)
    with offload:
        loss = forward()
    loss.backward()

What autograd saves is copied to the host beside the forward pass, and copied back before the backward pass asks for it:
when it asks for one tensor, the copies of the AHEAD that were saved before begin too. With activation checkpointing
(`train.recompute`) only each block's input is saved, and so travels. What several operations saved travels
once. Values are the same to the bit.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moesaic.recipe_offload import OffloadSection

SMALLEST = 2**16  # bytes; what is smaller stays where it is
AHEAD = 3
LEAVING = 4  # tensors that are on their way to the host at a time


class _Saved:
    """A tensor on the host, and on the device until its copy is made, or again once the way back has begun.

    What is on the device belongs to the stream that computes, which waits for a copy before it lets go of a tensor or
    uses one. So memory is free again in the order of the device's work, however far ahead of it the host is.
    """

    def __init__(self, tensor: Tensor, offload: ActivationOffload) -> None:
        self.device, self.offload = tensor.device, offload
        self.host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=offload.cuda)
        self.tensor: Tensor | None = None
        if not offload.cuda:
            self.host.copy_(tensor)
            return
        self.tensor = tensor.detach()  # not itself, which may hold on to whoever saved it
        self.copied = offload.copy(offload.down, self.host, self.tensor)

    def let_go(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        self.tensor = None

    def begin(self) -> None:
        """Start the way back."""
        if self.tensor is not None:
            return
        if not self.offload.cuda:
            self.tensor = self.host.clone(memory_format=torch.preserve_format)
            return
        self.tensor = torch.empty_strided(
            self.host.shape, self.host.stride(), dtype=self.host.dtype, device=self.device
        )
        self.copied = self.offload.copy(self.offload.up, self.tensor, self.host)

    def take(self) -> Tensor:
        self.begin()
        assert self.tensor is not None
        if self.offload.cuda:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.tensor

    def __del__(self) -> None:
        if self.tensor is not None and self.offload.cuda and not sys.is_finalizing():  # fetched, and never asked for
            torch.cuda.current_stream(self.device).wait_event(self.copied)


def saved_activations(offload: OffloadSection | None, model: nn.Module) -> AbstractContextManager[object]:
    """The context of a run's forward passes."""
    return ActivationOffload(model) if offload is not None and offload.activations else nullcontext()


class ActivationOffload:
    """A context for forward passes. `bytes` counts what went to the host."""

    def __init__(self, model: nn.Module, smallest: int = SMALLEST) -> None:
        self.model, self.smallest = model, smallest
        self.device = next(model.parameters()).device
        self.cuda = self.device.type == "cuda"
        self.bytes = 0
        self._stay: set[int] = set()
        self._saved: list[weakref.ref[_Saved]] = []  # in the order in which the forward pass saved them
        self._leaving: deque[_Saved] = deque()  # still on the device
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, weakref.ref[_Saved], int]] = {}
        if self.cuda:
            self.down, self.up = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def __enter__(self) -> ActivationOffload:
        self._saved, self._known, self._leaving = [], {}, deque()
        # Parameters, and views of them, are on the device anyway.
        self._stay = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._leaving.clear()  # the last ones stay on the device: the backward pass begins with them

    def _pack(self, tensor: Tensor) -> Tensor | tuple[_Saved, int]:
        size = tensor.numel() * tensor.element_size()
        if size < self.smallest or tensor.device != self.device or not _dense(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._stay:
            return tensor
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if place in self._known:  # the same values, if the memory is still that tensor's
            owner, found, number = self._known[place]
            if not owner.expired() and (saved := found()) is not None:
                return saved, number
        saved, number = _Saved(tensor, self), len(self._saved)
        self._saved.append(weakref.ref(saved))
        self._known[place] = StorageWeakRef(storage), weakref.ref(saved), number
        self.bytes += size
        if self.cuda:
            self._leaving.append(saved)
            if len(self._leaving) > LEAVING:
                self._leaving.popleft().let_go()
        return saved, number

    def copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Begin a copy beside the device's work, after what that has to do so far; the event says when it is done."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def _unpack(self, packed: Tensor | tuple[_Saved, int]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved, number = packed
        for earlier in self._saved[max(number - AHEAD, 0) : number]:
            if self.cuda and (other := earlier()) is not None:
                other.begin()
        return saved.take()


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory, each once, in whatever order of dimensions."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
