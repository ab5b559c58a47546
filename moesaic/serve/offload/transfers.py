"""Copies into slots and buffers while something else is computed: a thread on a CPU, a stream on a GPU.

    job = transfers.begin(copy, after)     `copy` will run beside the work that is under way
    job.wait()                             what is computed next sees what was copied

On a CPU a thread runs the copies one after the other; whoever waits for one that has not begun runs it himself, and one
that nobody needs any more can be cancelled until it begins. On a GPU a copy from pinned memory is queued at once in a
stream of its own, and waiting for it means that the stream that computes does.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

Copy = Callable[[], None]


class Job(Protocol):
    def wait(self) -> None: ...

    def cancel(self) -> bool:
        """Whether it will never run; False if it has begun."""


class ThreadJob:
    def __init__(self, copy: Copy) -> None:
        self._copy: Copy | None = copy
        self._lock = threading.Lock()
        self._taken = False
        self._done = threading.Event()
        self._error: BaseException | None = None

    def take(self) -> bool:
        with self._lock:
            mine, self._taken = not self._taken, True
        return mine

    def run(self) -> None:
        """By whoever has taken it."""
        assert self._copy is not None
        try:
            self._copy()
        except BaseException as error:
            self._error = error
        self._copy = None
        self._done.set()

    def wait(self) -> None:
        if self.take():
            self.run()
        self._done.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        return self.take()


class ThreadTransfers:
    """Copies on a thread, in the order in which they were begun. The thread ends when this object is no longer used."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ThreadJob | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._jobs,), name="offload", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._jobs, thread)

    def begin(self, copy: Copy, after: torch.cuda.Event | None = None) -> ThreadJob:
        job = ThreadJob(copy)
        self._jobs.put(job)
        return job

    def mark(self) -> None:
        """What is computed here is done when it has been called."""
        return None


def _end(jobs: queue.SimpleQueue[ThreadJob | None], thread: threading.Thread) -> None:
    """Waits for a copy that has begun: a process must not end in the middle of one, which aborts it."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=10)


def _work(jobs: queue.SimpleQueue[ThreadJob | None]) -> None:
    while (job := jobs.get()) is not None:
        if job.take():
            job.run()
        del job  # what it has copied from may be let go


class StreamJob:
    def __init__(self, device: torch.device, done: torch.cuda.Event) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def cancel(self) -> bool:
        return False


class StreamTransfers:
    """Copies in a stream, in the order in which they were begun."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def begin(self, copy: Copy, after: torch.cuda.Event | None = None) -> StreamJob:
        """Once the device has come as far as `after`: what is overwritten may be in use until then."""
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            copy()
            done = torch.cuda.Event()
            done.record()
        return StreamJob(self.device, done)

    def mark(self) -> torch.cuda.Event:
        """The end of what the device has been given to compute so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


Transfers = ThreadTransfers | StreamTransfers


def transfers_for(device: torch.device) -> Transfers:
    return StreamTransfers(device) if device.type == "cuda" else ThreadTransfers()
