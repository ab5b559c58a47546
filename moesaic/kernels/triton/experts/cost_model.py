"""What a tile will cost, learned from tiles that were timed, and a search that times those that look best.

The idea is AutoTVM's (Chen et al. 2018): timing is slow, since every tile is compiled first, and tiles that are alike
take alike. Here a ridge regression of the logarithm of time on a tile's numbers and their products is enough.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

Tile = tuple[int, ...]
Measure = Callable[[Tile], float]  # seconds, or inf for a tile that cannot run

FIRST = 8  # tiles timed before anything is learned
BATCH = 4  # tiles timed between two fits, one of them by chance
RIDGE = 0.1


def features(tiles: Sequence[Tile]) -> np.ndarray:
    logs_XK = np.log2(np.asarray(tiles, dtype=np.float64))
    pairs = [logs_XK[:, i] * logs_XK[:, j] for i in range(logs_XK.shape[1]) for j in range(i + 1)]
    return np.column_stack([logs_XK, *pairs])


class CostModel:
    def __init__(self, timed: dict[Tile, float]) -> None:
        found_XF = features(list(timed))
        self.mean_F, self.width_F = found_XF.mean(0), found_XF.std(0) + 1e-9
        x_XF = (found_XF - self.mean_F) / self.width_F
        y_X = np.log([*timed.values()])
        self.least = y_X.mean()
        moments_FF = x_XF.T @ x_XF + RIDGE * np.eye(x_XF.shape[1])
        self.weight_F = np.linalg.solve(moments_FF, x_XF.T @ (y_X - self.least))

    def predict(self, tiles: Sequence[Tile]) -> np.ndarray:
        """Logarithms of seconds."""
        guessed_X: np.ndarray = self.least + (features(tiles) - self.mean_F) / self.width_F @ self.weight_F
        return guessed_X


def search(space: Sequence[Tile], begin: Tile, measure: Measure, budget: int, seed: int = 0) -> tuple[Tile, float]:
    """The quickest of `budget` tiles of a space, `begin` among them, and its time. Ties go to `begin`."""
    chance = random.Random(seed)
    left = [tile for tile in dict.fromkeys(space) if tile != begin]
    timed = {begin: measure(begin)}
    chance.shuffle(left)
    for _ in range(min(FIRST, budget, len(left) + 1) - 1):
        tile = left.pop()
        timed[tile] = measure(tile)
    while left and len(timed) < budget:
        known = {tile: seconds for tile, seconds in timed.items() if math.isfinite(seconds)}
        if len(known) > 1:
            order = np.argsort(CostModel(known).predict(left), kind="stable")
            left = [left[i] for i in order]
        chosen = left[: BATCH - 1]
        left = left[BATCH - 1 :]
        if left:
            chosen.append(left.pop(chance.randrange(len(left))))
        for tile in chosen[: budget - len(timed)]:
            timed[tile] = measure(tile)
    best = min(timed, key=lambda tile: timed[tile])
    return best, timed[best]
