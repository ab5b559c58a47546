"""Short documents first (DeepSpeed Data Efficiency: difficulty by sequence length).

data: {curriculum: {name: length, pacing: root, start: 0.1, until: 0.5}}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.data.curricula._pacing import Paced
from moesaic.data.shards import Shards


@dataclass(frozen=True)
class LengthCurriculum(Paced):
    def difficulty(self, data: Shards) -> np.ndarray:
        return data.lengths.astype(np.float64)
