"""Documents of low quality first, the best opened last (DeepSpeed Data Efficiency's pacing over the column quality).

data: {curriculum: {name: quality, start: 0.2}}
data: {curriculum: {name: quality, best_first: true}}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.data.curricula._pacing import Paced
from moesaic.data.curricula.column import by_column
from moesaic.data.shards import Shards


@dataclass(frozen=True)
class QualityCurriculum(Paced):
    best_first: bool = False

    @property
    def needs(self) -> str:
        return "quality"

    def difficulty(self, data: Shards) -> np.ndarray:
        return by_column(data, self.needs, descending=self.best_first)
