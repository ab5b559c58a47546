"""Several micro-batches in flight: each stops where its rows are away, in the middle of a layer, and others go on.

    def work(pause):            # of one micro-batch: forward and backward, any code
        ...
        send(); pause(); receive()
        ...
    run([work, work, ...], depth=4)

A thread holds the place where a micro-batch stopped; one runs at a time, so nothing races. At most `depth` are under
way. Two begin at once, so that one can work while the other is away; any further one begins `apart` turns after the
last, so that not all of them are forward, or at their fullest, at the same time. Replies are taken in the order in
which they were asked for, so every rank that runs the same works stops and goes on in the same order, and messages
between two ranks need no tags.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

Work = Callable[[Callable[[], None]], None]


class _Paused:
    """One work, in a thread of its own that runs only while `resume` waits for it."""

    def __init__(self, work: Work) -> None:
        self.work, self.done, self.abandoned = work, False, False
        self.error: BaseException | None = None
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has its own
        self.mine, self.yours = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def resume(self) -> bool:
        """On to where it stops next; whether it goes on after that."""
        self.mine.release()
        self.yours.acquire()
        if self.done:
            self.thread.join()
        if self.error is not None:
            raise self.error
        return not self.done

    def abandon(self) -> None:
        self.abandoned = True
        self.mine.release()
        self.thread.join()

    def _pause(self) -> None:
        self.yours.release()
        self.mine.acquire()
        if self.abandoned:
            raise _AbandonedError

    def _run(self) -> None:
        self.mine.acquire()
        try:
            if self.device is not None:
                torch.cuda.set_device(self.device)
            # A backward pass that stops must do so in this thread, not in one that all of a device's share.
            with torch.autograd.set_multithreading_enabled(False):
                if not self.abandoned:
                    self.work(self._pause)
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.yours.release()


class _AbandonedError(BaseException):
    """Another micro-batch failed."""


def run(works: Sequence[Work], depth: int, apart: int = 0) -> None:
    """All of them, at most `depth` at a time."""
    to_start, waiting = deque(works), deque[_Paused]()
    turns = 0  # since the last began
    try:
        while to_start or waiting:
            due = len(waiting) < min(depth, 2) or (len(waiting) < depth and turns >= apart)
            fresh = to_start and due
            turns = 0 if fresh else turns + 1
            one = _Paused(to_start.popleft()) if fresh else waiting.popleft()
            if one.resume():
                waiting.append(one)
    finally:
        for one in waiting:
            one.abandon()
