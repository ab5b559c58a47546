"""Suites of evaluation, found by name: `moesaic evaluate DIR --suite NAME`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.model.transformer import Model
from moesaic.serve.kv_policies import KVPolicy

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """What every suite may need beside its own options."""

    data: Path | None = None
    progress: Told = lambda done, total: None
    kv_policy: KVPolicy | None = None  # of the engine


class Suite(ABC):
    takes_kv_policy = False  # whether answers come from an engine whose cache may be pruned

    @abstractmethod
    def run(self, model: Model, asked: Asked) -> dict[str, Any]:
        """Numbers by name; the suite's main one carries its own."""
