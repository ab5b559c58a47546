"""Curricula: difficulty of documents, and when harder ones are admitted. Each is one file, found by its name.

    data: {curriculum: {name: length, start: 0.1, until: 0.5, pacing: root}}    # opens the sorted pool by and by
    data: {curriculum: multi_domain}                                            # goes through it in order (Kaiyuan)

A curriculum never changes how much is drawn of which source: each source is ranked and opened, or sorted, by itself,
and the mixture interleaves them at its fixed ratios.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moesaic.data.shards import Shards


@dataclass(frozen=True)
class Curriculum:
    is_sorted: ClassVar[bool] = False  # easiest first within each phase, in place of shuffled

    @property
    def needs(self) -> str | None:
        """The column that difficulty is read from, where it is one that must be there."""
        return None

    def difficulty(self, data: Shards) -> np.ndarray:
        """A number for each document, the easiest lowest."""
        raise NotImplementedError

    def openings(self) -> list[tuple[float, float]]:
        """(done, share): once `done` of the run is done, the easiest `share` of every source is drawn from."""
        return [(0.0, 1.0)]
