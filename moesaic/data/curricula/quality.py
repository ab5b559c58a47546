"""Documents of low quality first, the best opened last (DeepSpeed Data Efficiency's pacing over the column quality).

data: {curriculum: {name: quality, start: 0.2}}
data: {curriculum: {name: quality, best_first: true}}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.data.curricula._pacing import Paced
from moesaic.data.shards import Shards


@dataclass(frozen=True)
class Quality(Paced):
    best_first: bool = False

    def difficulty(self, data: Shards) -> np.ndarray:
        quality = data.column("quality").astype(np.float64)
        return -quality if self.best_first else quality
