"""Pinned buffers through which tensors pass between a device and the host, while the device computes.

    buffer = staging.take()
    staging.fetch(buffer, gradients, staging.now())  # begins
    for gradient in buffer.wait(): ...               # on the host
    staging.send(buffer, masters, weights)           # rounds, and begins; the buffer is free again once it is done
    staging.settle()                                 # what the device does next sees what was sent

There are few buffers, so that little memory is pinned, whatever the size of the model. On a CPU the same code copies at
once, without pinning and streams.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Side = Literal["host", "device"]


class Buffer:
    """Bytes on the host; `views` are the tensors that lie in it, and are there once `wait` returns."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.done = torch.cuda.Event() if pinned else None
        self.views: list[Tensor] = []

    def lay_out(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Views as these tensors, of this type or their own, one after the other."""
        self.views, at = [], 0
        for tensor in tensors:
            size = tensor.numel() * (dtype or tensor.dtype).itemsize
            self.views.append(self.bytes[at : at + size].view(dtype or tensor.dtype).view(tensor.shape))
            at += aligned(size)
        return self.views

    def wait(self) -> list[Tensor]:
        if self.done is not None:
            self.done.synchronize()
        return self.views


class Staging:
    """`count` buffers of `size` bytes. `cast` says where gradients become float32: on the device, before they travel
    (twice the bytes), or on the host, by whoever takes them (more work for the host)."""

    def __init__(self, device: torch.device, size: int, count: int, cast: Side) -> None:
        self.device, self.cast = device, cast
        self.cuda = device.type == "cuda"
        self.size = size
        self.count = count
        self._free = deque(Buffer(size, self.cuda) for _ in range(count))
        self._sending: deque[Buffer] = deque()
        self._lock = threading.Lock()
        if self.cuda:
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def take(self, wait: bool = True) -> Buffer | None:
        """A free buffer; None if there is none and one does not want to wait for what is being sent."""
        with self._lock:
            if self._free:
                return self._free.popleft()
            if not self._sending or not (wait or self._sending[0].done is None or self._sending[0].done.query()):
                assert not wait, "every buffer is taken"
                return None
            buffer = self._sending.popleft()
        buffer.wait()
        return buffer

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def now(self) -> torch.cuda.Event | None:
        """The end of what the device has been given to do so far."""
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def fetch(self, buffer: Buffer, tensors: Sequence[Tensor], after: torch.cuda.Event | None) -> None:
        """Begin to copy tensors of the device into the buffer, once it has come so far."""
        dtype = torch.float32 if self.cast == "device" else None
        views = buffer.lay_out(tensors, dtype)
        if buffer.done is None:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor)
            return
        assert after is not None
        self._down.wait_event(after)
        with torch.cuda.stream(self._down):
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor.to(view.dtype), non_blocking=True)
                tensor.record_stream(self._down)  # whoever owns it may let go of it now
            buffer.done.record()

    def send(self, buffer: Buffer, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Round tensors of the host to the targets' types, and begin to copy them to the device."""
        if buffer.done is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            self.give(buffer)
            return
        views = buffer.lay_out(targets)
        for view, source in zip(views, sources, strict=True):
            view.copy_(source)
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            for view, target in zip(views, targets, strict=True):
                target.copy_(view, non_blocking=True)
            buffer.done.record()
        with self._lock:
            self._sending.append(buffer)

    def settle(self) -> None:
        """Let the device's next work wait for what is being sent."""
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_stream(self._up)


def aligned(size: int) -> int:
    return -(-size // 64) * 64


def cheaper_side(device: torch.device, numbers: int = 2**24, repeats: int = 3) -> Side:
    """Where it costs less to make float32 of a bfloat16 gradient: the host's time for it, or the link's for the further
    bytes. The result is the same to the bit; on a GPU this measures, on a CPU there is no link."""
    if device.type != "cuda":
        return "host"
    narrow, wide = torch.zeros(numbers, dtype=torch.bfloat16, pin_memory=True), torch.zeros(numbers)
    there, here = torch.empty_like(narrow, device=device), torch.empty_like(narrow, pin_memory=True)

    def seconds(cast: bool) -> float:
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            if cast:
                wide.copy_(narrow)
            else:
                here.copy_(there, non_blocking=True)  # as many bytes as float32 has more
        torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    seconds(True), seconds(False)
    return "host" if seconds(True) < seconds(False) else "device"
