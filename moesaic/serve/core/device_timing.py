"""When a device has done what it was given: on a CPU when the call returns, on a GPU later than the launch.

FlowPrefill stops a forward between two layers. On a GPU the host launches all layers of a forward in the time that the
device takes for the first few: whoever decides by launch times finds nothing left to stop, and learns that prompts take
no time. So the host keeps at most `AHEAD` layers queued, waits for the mark behind the layer before those, and takes
the seconds of a forward from marks in the device's own queue (CUDA events).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

AHEAD = 2  # layers that are launched before the one that is waited for has ended: the device never idles


class Mark(Protocol):
    """A place in a device's queue."""

    def wait(self) -> None:
        """Until the device is there."""

    def seconds_since(self, earlier: Mark) -> float:
        """The device's own time between two marks, both of which it has reached."""


class DeviceTimer(Protocol):
    def mark(self) -> Mark:
        """Behind all that was launched so far."""


@dataclass(frozen=True)
class HostMark:
    at: float

    def wait(self) -> None:
        """It was reached when it was made."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self.at - earlier.at


@dataclass(frozen=True)
class HostTimer:
    """Where a call returns when its work is done."""

    clock: Callable[[], float]

    def mark(self) -> HostMark:
        return HostMark(self.clock())


class CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return earlier.event.elapsed_time(self.event) / 1000.0


class CudaTimer:
    def mark(self) -> CudaMark:
        return CudaMark()


def timer_for(device: torch.device, clock: Callable[[], float]) -> DeviceTimer:
    return CudaTimer() if device.type == "cuda" else HostTimer(clock)


class Progress:
    """One run of layers: how far ahead of the device the host may be, and what the device has spent."""

    def __init__(self, timer: DeviceTimer, bounded: bool) -> None:
        self.timer, self.bounded = timer, bounded
        self.start = timer.mark()
        self.queued: deque[Mark] = deque()

    def launched(self) -> None:
        """A layer more is in the queue. Where a forward may be stopped, the host waits until few are left."""
        if not self.bounded:
            return
        self.queued.append(self.timer.mark())
        while len(self.queued) > AHEAD:
            self.queued.popleft().wait()

    def seconds(self) -> float:
        """Of all that was launched, once the device has done it."""
        end = self.timer.mark()
        end.wait()
        return end.seconds_since(self.start)
