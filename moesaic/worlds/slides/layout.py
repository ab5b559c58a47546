"""What is where on a slide, and how good a layout that is, in plain arithmetic (AeSlides): collisions, what sticks out,
the largest hole, balance; and whether what was asked for can be seen at all.

Every score is from 0 to 1. An empty slide has no layout, and 0 of everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTH, HEIGHT = 960, 540
CELL = 12  # pixels; holes and balance are measured on a raster of such cells
TOUCHING = 1.0  # pixels that two boxes may share
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Item:
    kind: str  # heading, text or picture
    text: str  # of a picture: what it is a picture of
    box: Box
    shown: bool = True  # it can be seen: neither hidden nor cut, and in letters that can be read

    @property
    def inside(self) -> bool:
        """Nine tenths of it, at least."""
        left, top, right, bottom = self.box
        there = max(0.0, min(right, WIDTH) - max(left, 0.0)) * max(0.0, min(bottom, HEIGHT) - max(top, 0.0))
        return there > 0 and there >= 0.9 * (right - left) * (bottom - top)


@dataclass(frozen=True)
class Layout:
    items: tuple[Item, ...]

    @classmethod
    def read(cls, found: Sequence[Mapping[str, Any]]) -> Layout:
        """As the browser says it."""
        return cls(tuple(Item(i["kind"], i["text"], box_of(i["box"]), bool(i["shown"])) for i in found))

    @property
    def colliding(self) -> int:
        """Pairs of which one lies on the other."""
        boxes = [item.box for item in self.items]
        return sum(overlap(one, other) for n, one in enumerate(boxes) for other in boxes[:n])

    def collisions(self) -> float:
        """1 without any, a half with one pair, a third with two."""
        return 1 / (1 + self.colliding) if self.items else 0.0

    def aspect(self) -> float:
        """How much of what it takes to show everything is the slide."""
        if not self.items:
            return 0.0
        left, top = (min(0.0, *(item.box[side] for item in self.items)) for side in (0, 1))
        right, bottom = (
            max(whole, *(item.box[side] for item in self.items)) for side, whole in ((2, WIDTH), (3, HEIGHT))
        )
        return float(WIDTH * HEIGHT / ((right - left) * (bottom - top)))

    def whitespace(self) -> float:
        """What the largest empty rectangle leaves."""
        return 1 - largest_rectangle(~self.raster()) * CELL * CELL / (WIDTH * HEIGHT) if self.items else 0.0

    def balance(self) -> float:
        """1 where what is on the slide is heavy in its middle, 0 where it all lies in a corner."""
        rows_N, columns_N = np.nonzero(self.raster())
        if not len(rows_N):
            return 0.0
        across = (columns_N.mean() + 0.5) * CELL / WIDTH - 0.5
        down = (rows_N.mean() + 0.5) * CELL / HEIGHT - 0.5
        return float(1 - np.hypot(2 * across, 2 * down) / np.sqrt(2))

    def content(self, wanted: Mapping[str, Any]) -> float:
        """The share of {title, points, picture} that can be seen, each once and in its own place; whatever else there
        is counts as missing."""
        asked = [("heading", wanted["title"]), *(("text", point) for point in wanted["points"])]
        asked += [("picture", wanted["picture"])] if wanted.get("picture") else []
        rest = [(item.kind, plain(item.text)) for item in self.items if item.shown and item.inside]
        right = 0
        for kind, text in asked:
            if (kind, plain(text)) in rest:
                rest.remove((kind, plain(text)))
                right += 1
        return right / max(len(asked), len(self.items))

    def raster(self) -> np.ndarray:
        """Which cells of the slide something lies on."""
        cells_RC = np.zeros((HEIGHT // CELL, WIDTH // CELL), bool)
        for item in self.items:
            left, top, right, bottom = (side / CELL for side in item.box)
            rows = slice(max(0, int(top)), max(0, int(np.ceil(bottom))))
            cells_RC[rows, max(0, int(left)) : max(0, int(np.ceil(right)))] = True
        return cells_RC


def plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def box_of(sides: Sequence[float]) -> Box:
    left, top, right, bottom = map(float, sides)
    return left, top, right, bottom


def overlap(one: Box, other: Box) -> bool:
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across > TOUCHING and down > TOUCHING


def largest_rectangle(empty_RC: np.ndarray) -> int:
    """Cells of the largest rectangle of cells that are all empty: over every row, the best below a skyline."""
    heights, best = np.zeros(empty_RC.shape[1] + 1, int), 0  # one more of height 0, which ends all
    for row_C in empty_RC:
        heights[:-1] = np.where(row_C, heights[:-1] + 1, 0)
        rising: list[tuple[int, int]] = []  # where a height begins, and the height
        for place, height in enumerate(heights.tolist()):
            begin = place
            while rising and rising[-1][1] >= height:
                begin, taller = rising.pop()
                best = max(best, taller * (place - begin))
            rising.append((begin, height))
    return best
