"""Regular documents first, exceptions last ("Characterizing Structural Regularities of Labeled Data").

    score_consistency(Shards("out/data"), ["out/run/step-200", "out/run/step-400", "out/run/step-800"])
    data: {curriculum: {name: consistency, pacing: root}}

The paper's score is the expected accuracy on a document that was held out; its cheap proxy, used here, is the average
probability of the right token over the course of training, which `score_consistency` takes over several checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.data.curricula._pacing import Paced
from moesaic.data.curricula.column import by_column
from moesaic.data.shards import Shards

COLUMN = "consistency"


@dataclass(frozen=True)
class Consistency(Paced):
    @property
    def needs(self) -> str:
        return COLUMN

    def difficulty(self, data: Shards) -> np.ndarray:
        return by_column(data, COLUMN, descending=True)
