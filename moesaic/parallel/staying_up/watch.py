"""Every rank says what it is doing, and hears whether another is stuck: a run ends in words then, and never just hangs.

A thread posts to the store of the launcher, some twenty times within the bound. The first rank reads what all have
posted; another does once it has waited for a while itself, so a store has little to do even with many ranks. When
`stuck` (verdict.py) finds one, it is said on the terminal and in the run's events, and the process ends with EXIT:
`torchrun` then ends the others, and starts all again if it may (`--max-restarts`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moesaic.parallel.staying_up.activity import Activity
from moesaic.parallel.staying_up.verdict import Stuck, Word, stuck

EXIT = 75  # "a failure that may pass: try again" (sysexits.h)
OFTEN = 20  # posts within the bound
LONGEST = 5.0  # seconds between two
EARLY = 0.8  # of the bound, after which a rank is given up: it is to be named before the bound is over
SILENCE = 4  # posts that a living rank may miss
SOON = 0.1  # of the time between two posts: how soon a new operation is posted, at the most as often


class Watch:
    """`begun`: collectives begun in each group; `beat` is called with every post; `end` ends this process."""

    def __init__(
        self,
        activity: Activity,
        store: dist.Store,
        rank: int,
        ranks: int,
        begun: Callable[[], Mapping[str, int]],
        timeout: float,
        events: Path | None = None,
        beat: Callable[[], None] = lambda: None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.activity, self.rank, self.ranks, self.begun = activity, rank, ranks, begun
        # A connection of its own: another thread's may be blocked.
        self.store = dist.PrefixStore("staying_up", store.clone())  # type: ignore[attr-defined]
        self.bound, self.interval = EARLY * timeout, min(LONGEST, timeout / OFTEN)
        self.events, self.beat, self.end = events, beat, end
        self.main = threading.main_thread().ident
        self.beats = 0
        self._seen: dict[int, tuple[int, float, Word]] = {}  # rank -> its last post's number, when it was new, itself
        self._progress: tuple[Any, float] = (None, time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="staying up", daemon=True)

    def start(self) -> None:
        self.post()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * self.interval)

    def _run(self) -> None:
        while not self._over.wait(SOON * self.interval):
            self.activity.changed.wait((1 - SOON) * self.interval)
            self.activity.changed.clear()
            try:
                stalled = self.post()
                self.beat()
                if self.rank and stalled < self.bound / 3:
                    continue
                if (found := stuck(self.words(), self.bound, SILENCE * self.interval)) is not None:
                    self.tell(found)
                    wake(self._seen[found.rank][2])
                    self.end(EXIT)
            except RuntimeError:  # the store is gone, and with it the launcher: collectives have bounds of their own
                return

    def post(self) -> float:
        """Say what this rank does; how long it has been without progress."""
        activity, begun, now = self.activity, dict(self.begun()), time.monotonic()
        if (changed := (activity.changes, activity.step, begun)) != self._progress[0]:
            self._progress = changed, now
        stalled = now - self._progress[1]
        self.beats += 1
        word = Word(
            self.rank, activity.step, activity.operation, stalled, patient=activity.patient, begun=begun,
            line=_line_of(self.main), host=socket.gethostname(), pid=os.getpid(),
        )  # fmt: skip
        self.store.set(str(self.rank), json.dumps([self.beats, asdict(word)]))
        return stalled

    def words(self) -> list[Word]:
        """What all ranks have said last; of those that have not begun yet, nothing."""
        now, found = time.monotonic(), []
        for rank in range(self.ranks):
            if not self.store.check([str(rank)]):
                continue
            beat, said = json.loads(self.store.get(str(rank)))
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now, Word(**said)
            _, since, word = self._seen[rank]
            silent = now - since
            found.append(Word(**(asdict(word) | {"silent": silent, "stalled": word.stalled + silent})))
        return found

    def tell(self, found: Stuck) -> None:
        """In words, once: by whoever finds it first."""
        if self.store.add("told", 1) > 1:
            return
        state = STATES.get(process_state(self._seen[found.rank][2]), "")
        text = found.text + (f"; its process {state}" if state else "")
        print(f"moesaic: {text}. This run ends.", file=sys.stderr, flush=True)
        write_event(self.events, text, kind="stuck", step=found.step, rank=found.rank,
                    operation=found.operation, seconds=round(found.seconds, 3))  # fmt: skip

    def lost(self, error: BaseException) -> str:
        """Why a collective failed, in words: which ranks are gone."""
        step, operation = self.activity.step, self.activity.operation
        gone: list[Word] = []
        with suppress(RuntimeError):  # the store may be gone too
            gone = self._gone()
        names = ", ".join(f"rank {word.rank} (last heard of in step {word.step}, {word.operation})" for word in gone)
        why = f"{names} ended" if gone else f"another rank ended or did not answer ({first_line(error)})"
        text = f"{why}; rank {self.rank} was in step {step}, {operation}"
        with suppress(RuntimeError):
            if self.store.add("told", 1) == 1:
                ranks = [word.rank for word in gone]
                write_event(self.events, text, kind="lost", step=step, ranks=ranks, operation=operation)
        return text

    def _gone(self) -> list[Word]:
        """Ranks whose process has ended, or, for a while, whoever falls silent: of another machine no more is known."""
        until = time.monotonic() + min(LONGEST, (SILENCE + 1) * self.interval)
        while True:
            words = self.words()
            gone = [word for word in words if word.rank != self.rank and process_state(word) in ("Z", "X")]
            gone = gone or [word for word in words if word.silent >= SILENCE * self.interval]
            if gone or time.monotonic() > until:
                return gone
            time.sleep(self.interval / 4)


STATES = {"T": "is stopped", "D": "waits for a device or disk", "Z": "has ended", "X": "has ended"}


def process_state(word: Word) -> str:
    """Of a rank of this machine, as the system calls it; of another machine nobody here knows."""
    if word.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return ""
    try:
        return Path(f"/proc/{word.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wake(word: Word) -> None:
    """A stopped process hears no request to end, and the launcher would wait half a minute before it kills it."""
    if process_state(word) == "T":
        with suppress(OSError):
            os.kill(word.pid, signal.SIGCONT)


def write_event(events: Path | None, text: str, *, kind: str, step: int, **facts: Any) -> None:
    """A line at the end of a run's events, whichever rank writes it."""
    if events is None:
        return
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"kind": kind, "step": step, "when": when, "text": text, **facts}) + "\n"
    handle = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _line_of(thread: int | None) -> str:
    """Where in this program a thread is: `experts/exchange.py:31 counts`."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        before, ours, file = frame.f_code.co_filename.rpartition("moesaic/")
        if ours:
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
