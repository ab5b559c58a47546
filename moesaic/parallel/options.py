"""How ranks work together, besides the layout: what a recipe's `parallel` section says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelOptions:
    exact: bool = False  # sums in the order of ranks: the bits of one process that accumulates as many micro-batches
    chunks: int = 1  # groups of experts whose rows travel while others compute
    dispatch: Literal["plain", "once"] = "plain"  # once: a token crosses to a rank once, however many experts want it
    tiles: int = 1  # of rows, that travel while others are multiplied (tensor parallel)
    schedule: str = "1f1b"  # of a pipeline
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; none given: as equal as can be
