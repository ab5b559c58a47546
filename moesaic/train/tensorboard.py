"""TensorBoard event files under `DIR/tensorboard`, where a writer is installed.

tensorboard --logdir DIR/tensorboard
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
WRITERS = ("tensorboardX", "torch.utils.tensorboard")
SKIP = {"step", "expert_load"}


class Board:
    def __init__(self, directory: Path, writer: type[Any], after: int) -> None:
        self._directory, self._writer = directory / FOLDER, writer
        self._open(after)

    @classmethod
    def find(cls, directory: Path, after: int = 0) -> Board | None:
        """A board that goes on after a step, or None where no writer is installed."""
        for name in WRITERS:
            try:
                return cls(directory, importlib.import_module(name).SummaryWriter, after)
            except ImportError:
                continue
        return None

    def _open(self, after: int) -> None:
        # TensorBoard itself hides the steps from `purge_step` on that earlier files hold.
        purge = {"purge_step": after + 1} if self._directory.exists() else {}
        self._files = self._writer(str(self._directory), flush_secs=30, **purge)

    def resume(self, after: int) -> None:
        """Steps that were shown after this one no longer count."""
        self._files.close()
        self._open(after)

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name not in SKIP and isinstance(value, int | float):
                self._files.add_scalar(name, float(value), line["step"])

    def close(self) -> None:
        self._files.close()
