"""Suites of evaluation, found by name: `moesaic evaluate DIR --suite NAME`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.model.transformer import Model
from moesaic.serve.core.kv_policies import KVPolicy

if TYPE_CHECKING:
    from moesaic.evaluate.backends import Backend

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Weights:
    """How a model's weights are loaded, and where it runs."""

    dtype: str | None = None
    device: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class SuiteContext:
    """What every suite may need beside its own options."""

    data: Path | None = None
    progress: Progress = lambda done, total: None
    kv_policy: KVPolicy | None = None  # of the engine
    backend: Backend | None = None  # what answers questions; by default an engine over the model
    weights: Weights = Weights()


class Suite(ABC):
    takes_kv_policy = False  # whether answers come from an engine whose cache may be pruned
    needs_model = True  # whether the model itself is looked into; else a server's answers will do
    takes_model = True  # False for what is measured without any
    takes_data = False  # whether it reads the file of --data

    def check(self, data: Path | None) -> None:
        """Whatever can be known to be wrong before a model is loaded."""
        return None

    @abstractmethod
    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        """Numbers by name; the suite's main one carries its own. There is a model if it needs one."""
