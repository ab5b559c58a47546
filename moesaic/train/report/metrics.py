"""Metrics and events of a run: `DIR/metrics.jsonl`, one line per step, and `DIR/events.jsonl`.

    metrics = Metrics(directory)
    metrics.resume(120)                     # steps after the 120th are dropped, as if the run had never gone past it
    metrics.write({"step": 121, "loss": 3.2, ...})
    read_metrics(directory)                 # one dictionary per step, in order

A line is handed to the system whole, in one call, so a killed run loses at most the line it was writing. The metrics
are what an uninterrupted run would have written; the events are what really happened, interruptions included.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.errors import UserError

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
Line = dict[str, Any]


class Journal:
    """A file of JSON lines that only grows. Whatever a killed writer left half written at its end is removed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = _end_of_last_line(self._handle)
        if self._size < os.fstat(self._handle).st_size:
            os.ftruncate(self._handle, self._size)

    def append(self, line: Mapping[str, Any]) -> None:
        left = memoryview(encode(line))
        length = len(left)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            os.ftruncate(self._handle, self._size)  # a full disk takes part of a line
            raise OSError(error.errno, error.strerror, str(self.file)) from error
        self._size += length

    def replace(self, lines: list[bytes]) -> None:
        """Make these the whole file: a reader, or a run that is killed meanwhile, finds the old lines or the new."""
        atomic.write_bytes(self.file, b"".join(lines))
        os.close(self._handle)
        self._open()

    def sync(self) -> None:
        """Onto the disk itself, so that it outlasts the machine as well as the process."""
        os.fsync(self._handle)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Metrics(Journal):
    """One line per step, the steps in ascending order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Path(directory) / METRICS)

    def write(self, line: Mapping[str, Any]) -> None:
        self.append(line)

    def resume(self, step: int) -> list[Line]:
        """Drop what was recorded after `step`, atomically, and return it; also lines that no one could read."""
        kept: dict[int, bytes] = {}
        dropped: dict[int, Line] = {}
        raw = self.file.read_bytes()
        for text, line in _parsed(raw):
            if line is None:
                continue
            if line["step"] <= step:
                kept[line["step"]] = text + b"\n"  # the later of two lines for one step is the one that counts
            else:
                dropped[line["step"]] = line
        lines = [kept[number] for number in sorted(kept)]
        if b"".join(lines) != raw:
            self.replace(lines)
        return [dropped[number] for number in sorted(dropped)]

    def last(self) -> Line | None:
        """The newest line."""
        start = max(0, self._size - 1)
        while start:
            begin = max(0, start - 65_536)
            newline = os.pread(self._handle, start - begin, begin).rfind(b"\n")
            if newline >= 0:
                start = begin + newline + 1
                break
            start = begin
        text = os.pread(self._handle, self._size - start, start)
        return _parse(text) if text else None


def encode(line: Mapping[str, Any]) -> bytes:
    """One JSON line; a number JSON cannot represent (infinity, nan) becomes null."""
    try:
        text = json.dumps(line, allow_nan=False, separators=(", ", ": "))
    except ValueError:
        text = json.dumps(_finite(line), allow_nan=False, separators=(", ", ": "))
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def read_metrics(directory: str | Path) -> list[Line]:
    """A run's steps in order. Where a step was recorded twice the later one counts; a half-written end is left out."""
    steps = {line["step"]: line for line in _read(Path(directory) / METRICS)}
    return [steps[number] for number in sorted(steps)]


def read_events(directory: str | Path) -> list[Line]:
    """What happened to a run, in the order it happened: `kind`, `step`, `text`, and what belongs to that kind."""
    file = Path(directory) / EVENTS
    return list(_read(file)) if file.is_file() else []


def _read(file: Path) -> Iterator[Line]:
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        raise UserError(file, "no such file; a run writes it from its first step") from None
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})") from None
    broken = 0
    for number, (_, line) in enumerate(_parsed(raw), start=1):
        if broken:
            raise UserError(f"{file}:{broken}", "is not a line of metrics", "Resume the run, or remove the line.")
        if line is None:
            broken = number  # harmless if it is the last: the run was stopped while writing it
        else:
            yield line


def _parsed(raw: bytes) -> Iterator[tuple[bytes, Line | None]]:
    for text in raw.split(b"\n"):
        if text.strip():
            yield text, _parse(text)


def _parse(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _end_of_last_line(handle: int) -> int:
    end = os.fstat(handle).st_size
    while end:
        begin = max(0, end - 65_536)
        newline = os.pread(handle, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
