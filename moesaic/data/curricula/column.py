"""Difficulty from a column of the data (DeepSpeed Data Efficiency's user metric): one of a source, of data.scores, or
one that was computed later.

    data: {curriculum: {name: column, column: grade_level}}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.data.curricula._pacing import Paced
from moesaic.data.shards import Shards
from moesaic.errors import UserError


@dataclass(frozen=True)
class ColumnCurriculum(Paced):
    column: str = ""
    descending: bool = False  # the highest numbers are the easiest

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.column:
            raise ValueError("names no column; write column: and its name")

    @property
    def needs(self) -> str:
        return self.column

    def difficulty(self, data: Shards) -> np.ndarray:
        return by_column(data, self.column, self.descending)


def by_column(data: Shards, column: str, descending: bool) -> np.ndarray:
    values = data.column(column).astype(np.float64)
    if np.isnan(values).any():
        raise UserError(data.directory, f'the column "{column}" has gaps', "Every source must have it.")
    return -values if descending else values
