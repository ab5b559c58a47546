"""What stages on preference pairs have in common: their sources, and how many pairs are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moesaic.align.stages import PAIRS, Data, Stage, sources


@dataclass(frozen=True)
class PairStage(Stage):
    data: Data = ()
    held_out: Data = ()  # what accuracy is measured on; by default builtin families' test split
    pairs: int = 1000  # taken of each builtin source
    batch_pairs: int = 32  # of a step
    max_length: int = 1024  # tokens of a prompt with its completion; longer pairs are left out
    objective: dict[str, Any] = field(default_factory=dict)  # options of the stage's objective

    def __post_init__(self) -> None:
        sources(self.data, PAIRS)
        if self.held_out:
            sources(self.held_out, PAIRS)
        if min(self.pairs, self.batch_pairs, self.max_length) < 1:
            raise ValueError("pairs, batch_pairs and max_length are at least 1")
