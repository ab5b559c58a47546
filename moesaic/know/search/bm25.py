"""BM25 in Lucene's form (Robertson and others), for every index of words here: on disk, and a few texts in memory."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

SATURATION = 1.5  # k1: how soon more of the same word says no more
SHORTENING = 0.75  # b: how much more a long text must say

Numbers = TypeVar("Numbers", float, np.ndarray)


def rarity(texts: int, holding: int) -> float:
    """How much a word says that `holding` of `texts` hold."""
    return math.log(1 + (texts - holding + 0.5) / (holding + 0.5))


def norm(length: Numbers, mean: float, saturation: float = SATURATION, shortening: float = SHORTENING) -> Numbers:
    """What the count of a word is weighed against in a text of this length: `count / (count + norm)`."""
    return saturation * (1 - shortening + shortening * length / mean)
