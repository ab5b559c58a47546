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

import weakref
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moesaic.recipe_offload import OffloadSection

SMALLEST = 2**16  # bytes; what is smaller stays where it is
AHEAD = 3


class _Saved:
    """A tensor that is on the host, or on its way there or back."""

    def __init__(self, tensor: Tensor, offload: ActivationOffload) -> None:
        self.device, self.offload = tensor.device, offload
        self.stride = tensor.stride()
        self.back: Tensor | None = None
        self.host = torch.empty_strided(tensor.shape, self.stride, dtype=tensor.dtype, pin_memory=offload.cuda)
        if not offload.cuda:
            self.host.copy_(tensor)
            return
        offload.down.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(offload.down):
            self.host.copy_(tensor, non_blocking=True)
            self.there = torch.cuda.Event()
            self.there.record()
        tensor.record_stream(offload.down)

    def begin(self) -> None:
        """Start the way back. A pinned block is not given out again before the copies recorded on it are done."""
        if self.back is not None:
            return
        if not self.offload.cuda:
            self.back = self.host.clone(memory_format=torch.preserve_format)
            return
        with torch.cuda.stream(self.offload.up):
            self.offload.up.wait_event(self.there)
            self.back = torch.empty_strided(self.host.shape, self.stride, dtype=self.host.dtype, device=self.device)
            self.back.copy_(self.host, non_blocking=True)
            self.here = torch.cuda.Event()
            self.here.record()

    def take(self) -> Tensor:
        self.begin()
        assert self.back is not None
        if self.offload.cuda:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.here)
            self.back.record_stream(stream)
        return self.back


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
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, weakref.ref[_Saved], int]] = {}
        if self.cuda:
            self.down, self.up = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def __enter__(self) -> ActivationOffload:
        self._saved, self._known = [], {}
        # Parameters, and views of them, are on the device anyway.
        self._stay = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

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
        return saved, number

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
