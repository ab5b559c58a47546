"""TensorBoard event files under `DIR/tensorboard`, where tensorboardX is installed.

tensorboard --logdir DIR/tensorboard

They are written here and not by the thread of a `SummaryWriter`: on a full disk that ends with a traceback, and who
hands it the next values then waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
SKIP = {"step", "expert_load"}
FLUSH = 30.0  # seconds


class TensorBoard:
    """Raises OSError when something cannot be written, and ImportError where tensorboardX is not installed."""

    def __init__(self, directory: Path, after: int = 0) -> None:
        """`after` is the step a run resumes from."""
        self._directory = directory / FOLDER
        self._open(after)

    def _open(self, after: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        goes_on = self._directory.exists()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files, self._flushed = EventsWriter(str(self._directory / "events"), f".{after}"), 0.0
        if goes_on:  # TensorBoard itself hides the steps from this on that earlier files hold
            start = SessionLog(status=SessionLog.START)
            self._files.write_event(Event(wall_time=time.time(), step=after + 1, session_log=start))

    def resume(self, after: int) -> None:
        """Steps written after this one no longer count."""
        self._files.close()
        self._open(after)

    def write(self, line: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in line.items()
            if name not in SKIP and isinstance(value, int | float)
        ]
        now = time.time()
        self._files.write_event(Event(wall_time=now, step=line["step"], summary=Summary(value=values)))
        if now - self._flushed > FLUSH:
            self._files.flush()
            self._flushed = now

    def close(self) -> None:
        self._files.close()
