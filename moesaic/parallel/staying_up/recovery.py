"""A run that many ranks began and that was cut off: how it is known, and how long it took to go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

MARK = ".running"  # in a run's directory: touched as long as it runs, and gone once it has ended in order


def last_sign(out: Path, signs: Sequence[str]) -> float | None:
    """When a run in this directory that was cut off gave its last sign, in one of these files; None if none was."""
    if not (out / MARK).exists():
        return None
    times = []
    for name in (MARK, *signs):
        with suppress(OSError):
            times.append((out / name).stat().st_mtime)
    return max(times, default=time.time())


def note_recovery(since: float | None, step: int, again: int, note: Callable[..., None]) -> None:
    """A run that goes on after `step` says how long it was down, and how many steps are taken `again`."""
    if since is None:
        return
    seconds = max(0.0, time.time() - since)
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    what = f"resumed after {seconds:.1f} s" + (f" (restart {restart})" if restart else "")
    lost = f"steps taken again: {again:,}" if again else "no step is lost"
    facts = {"seconds": round(seconds, 3), "restart": restart, "lost": again}
    note(f"{what}: goes on after step {step:,}, {lost}", kind="recovery", **facts)
