"""Kaiyuan-2B's multi-domain curriculum: ascending quality within each domain, domains interleaved at a fixed ratio.

    data: {curriculum: multi_domain}
    data: {curriculum: {name: multi_domain, column: edu}}

Within each phase every source is sorted by itself, lowest quality first, and the mixture's weights interleave them, so
that the ratio of domains is the same from beginning to end. A phase that draws only part of a source sorts a fair
sample of it; one that repeats it goes through it in as many ascending sweeps. It pays only if the learning rate is
still high at the end (see the schedules and train.average).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moesaic.data.curricula import Curriculum
from moesaic.data.curricula.column import by_column
from moesaic.data.shards import Shards


@dataclass(frozen=True)
class MultiDomain(Curriculum):
    is_sorted: ClassVar[bool] = True
    column: str = "quality"
    descending: bool = False  # best first, to compare with

    @property
    def needs(self) -> str:
        return self.column

    def difficulty(self, data: Shards) -> np.ndarray:
        return by_column(data, self.column, self.descending)
