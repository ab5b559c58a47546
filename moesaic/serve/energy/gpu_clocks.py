"""The clocks of an engine's GPUs, as the engine sees them: through a process that outlives it (`keeper.py`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from moesaic.errors import UserError

logger = logging.getLogger("moesaic.serve")

LEVELS = 16  # clocks to choose among: a driver offers one every 15 MHz
START_SECONDS = 30.0
END_SECONDS = 5.0
PROGRAM = "import sys; sys.path[:] = {path!r}; from moesaic.serve.energy.keeper import main; main({uuids!r})"


class Clocks(Protocol):
    levels: tuple[float, ...]

    def set(self, clock: float) -> bool:
        """Ask for a clock, and return at once; False where nobody is there to set it any more."""

    def close(self) -> None:
        """Give the clocks back to the driver."""


class GpuClocks:
    """All GPUs at the same clock. UserError says why they cannot be set."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._program = PROGRAM.format(path=sys.path, uuids=list(uuids))
        self._start()

    def _start(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a signal to the engine's processes is not for it
        )
        self.close = weakref.finalize(self, _end, self._keeper, os.getpid())
        found = self._answer()
        if found.get("problem") or not found.get("clocks"):
            self.close()
            raise UserError("--frequency", str(found.get("problem") or "the GPU offers no clocks"))
        self.levels = thinned([float(clock) for clock in found["clocks"]])
        assert self._keeper.stdin is not None
        os.set_blocking(self._keeper.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def _answer(self) -> dict[str, Any]:
        assert self._keeper.stdout is not None
        poll = select.poll()
        poll.register(self._keeper.stdout, select.POLLIN)
        line = self._keeper.stdout.readline() if poll.poll(START_SECONDS * 1000) else b""
        return dict(json.loads(line)) if line else {"problem": "the process that sets clocks did not start"}

    def set(self, clock: float) -> bool:
        if self._write(clock):
            return True
        if not self.close.alive:
            return False
        self.close()  # it died, and left the clock locked: another one must be there to reset it
        try:
            self._start()
        except UserError as error:
            logger.warning("%s; clocks stay as they are", error)
            return False
        return self._write(clock)

    def _write(self, clock: float) -> bool:
        assert self._keeper.stdin is not None
        try:
            os.write(self._keeper.stdin.fileno(), f"{clock:.0f}\n".encode())
        except BlockingIOError:  # it is behind, and a newer wish will come
            pass
        except (OSError, ValueError):
            return False
        return True


def thinned(clocks: Sequence[float], most: int = LEVELS) -> tuple[float, ...]:
    """At most so many of them, evenly spread, the lowest and the highest included."""
    clocks = sorted(set(clocks))
    if len(clocks) <= most:
        return tuple(clocks)
    return tuple(clocks[round(place * (len(clocks) - 1) / (most - 1))] for place in range(most))


def _end(keeper: subprocess.Popen[bytes], owner: int) -> None:
    """It resets the clocks when its input is closed. It is not killed while it might still be doing so."""
    if os.getpid() != owner:  # a fork: the other one still needs it
        return
    assert keeper.stdin is not None and keeper.stdout is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(END_SECONDS)
    keeper.stdout.close()
