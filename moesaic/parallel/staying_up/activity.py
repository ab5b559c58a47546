"""What this rank is doing: its step and its operation, which the others hear of (watch.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """`patient`: that this may take as long as it takes, as preparing data or waiting for a disk does."""

    def __init__(self) -> None:
        self.step = 0
        self.operation = "starting"
        self.patient = True
        self.changes = 0
        self.changed = threading.Event()  # set with every change, for whoever passes it on

    @contextmanager
    def doing(self, operation: str, *, patient: bool = False) -> Iterator[None]:
        """One within another stands for it as long as it lasts. One that fails stays: what failed is to be said."""
        before = self.operation, self.patient
        self.enter(operation, patient)
        yield
        self.enter(*before)

    def enter(self, operation: str, patient: bool = False) -> None:
        self.operation, self.patient = operation, patient
        self.changes += 1
        self.changed.set()
