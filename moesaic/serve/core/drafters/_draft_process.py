"""The draft model's process as the engine sees it: started, spoken to, listened to, killed when it is silent, started
again. Nothing here waits, but for the first start: an engine without its draft process serves on without drafts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref

from moesaic.errors import UserError
from moesaic.serve.core.drafters._draft_messages import Close, Extend, Failed, Open, Ready, Setup, Trees, Update, Wire

logger = logging.getLogger("moesaic.serve")

START_SECONDS = 600.0  # until it has loaded its model
RESTART_SECONDS = 1.0  # before the first restart; twice as long before each further one
MAX_RESTART_SECONDS = 60.0
STEADY_SECONDS = 60.0  # after which a restart is a first one again
PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor}, {parent})"
MODULE = f"{__package__}._draft_worker"


class _Held:
    """What must not be left over."""

    def __init__(self, process: subprocess.Popen[bytes], wire: Wire) -> None:
        self.process, self.wire, self.owner = process, wire, os.getpid()

    def end(self) -> None:
        if os.getpid() == self.owner:  # not in a fork
            self.process.kill()
            self.process.wait()
        self.wire.socket.close()


class DraftProcess:
    """`ready` while it can be spoken to. `starts` counts its lives: whatever was said belongs to one of them."""

    def __init__(self, setup: Setup, stall_seconds: float) -> None:
        self.setup, self.stall_seconds = setup, stall_seconds
        self.starts, self.ready, self.idle = 0, False, True
        self._backoff, self._due = RESTART_SECONDS, 0.0
        self._held: _Held | None = None
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            program = PROGRAM.format(path=sys.path, module=MODULE, descriptor=theirs.fileno(), parent=os.getpid())
            process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._held = _Held(process, Wire(ours))
        self._end = weakref.finalize(self, self._held.end)
        self.starts += 1
        self._sent = self._seen = 0
        self._began = self._heard = time.monotonic()
        self._held.wire.send(self.setup)

    @property
    def pid(self) -> int | None:
        return self._held.process.pid if self._held is not None else None

    def wait(self) -> Ready:
        """Until it has loaded its model for the first time; what keeps it from that is raised here."""
        assert self._held is not None
        try:
            while (left := self._began + START_SECONDS - time.monotonic()) > 0:
                for message in self._held.wire.receive(left):
                    if isinstance(message, Failed):
                        raise message.problem
                    assert isinstance(message, Ready)
                    self.ready = True
                    return message
        except EOFError:
            code = self._held.process.wait()
            problem = f"the draft model's process ended as it started (exit code {code})"
            raise UserError(self.setup.path, problem, "Is there memory enough for the model?") from None
        finally:
            if not self.ready:
                self.close()
        raise UserError(self.setup.path, f"the draft model was not loaded within {START_SECONDS:.0f} seconds")

    def send(self, message: Open | Extend | Close) -> None:
        if not self.ready or self._held is None:
            return
        if self._sent == self._seen:
            self._heard = time.monotonic()  # until now there was nothing to answer
        self._sent += 1
        try:
            self._held.wire.send(message)
        except EOFError:
            self._lost("died")

    def receive(self, seconds: float = 0.0) -> list[Update]:
        """What it has found since; the first of it is waited for so long. Also sees to it that there is a process."""
        if self._held is None:
            if self.starts and time.monotonic() >= self._due:
                self._start()
            return []
        updates: list[Update] = []
        try:
            for message in self._held.wire.receive(seconds if self.ready else 0.0):
                self._heard = time.monotonic()
                if isinstance(message, Trees):
                    self._seen, self.idle = message.seen, message.idle
                    updates += message.updates
                elif isinstance(message, Failed):
                    self._lost(f"cannot start again: {message.problem}")
                else:
                    self.ready = True
        except EOFError:
            self._lost("died")
            return []
        self._check()
        return updates

    @property
    def answered(self) -> bool:
        """Whether it knows all it was told, and has computed what it would."""
        return self.ready and self._sent == self._seen and self.idle

    def _check(self) -> None:
        now = time.monotonic()
        if self.ready and self._sent > self._seen and now - self._heard > self.stall_seconds:
            self._lost(f"was silent for {self.stall_seconds:g} seconds")
        elif not self.ready and now - self._began > START_SECONDS:
            self._lost(f"did not start within {START_SECONDS:.0f} seconds")

    def _lost(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._began > STEADY_SECONDS:
            self._backoff = RESTART_SECONDS
        logger.warning("the draft process %s; serving without it, again in %g s", problem, self._backoff)
        self._kill()
        self._due, self._backoff = now + self._backoff, min(MAX_RESTART_SECONDS, 2 * self._backoff)

    def _kill(self) -> None:
        self.ready = False
        if self._held is not None:
            self._held = None
            with contextlib.suppress(OSError):
                self._end()

    def close(self) -> None:
        self._kill()
        self.starts = 0  # and none again
