"""Slides to be written as HTML (AeSlides' kind of task): a title, some points, a picture. An answer is right if all of
it is there; how it looks is what rewards measure (`align/rewards/slides.py`).

    tasks("slides:crowded=0.6", "train", 0).solution      # laid out by code, six in ten of them without looking

Places are those of a grid of twelve columns and eight rows, `<p class="x1 y2 w5">`, so that a very small model can
write them; styles of one's own will do as well.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser
from typing import Any

TITLES = (
    *("Rain", "Bees", "Tides", "Bread", "Glass", "Trains", "Maps", "Salt", "Wool", "Stars", "Ice", "Paper"),
    *("Roots", "Clay", "Sails", "Steel", "Honey", "Sand", "Wind", "Coal", "Moss", "Bells", "Seeds", "Dunes"),
)
FIRST = ("warm", "cold", "old", "new", "slow", "fast", "soft", "hard", "dry", "wet", "thin", "deep", "far", "near")
SECOND = ("air", "stone", "light", "water", "wood", "trade", "craft", "growth", "heat", "flow", "grain", "dust")
PICTURES = ("river", "field", "tower", "garden", "bridge", "market", "forest", "harbour", "valley", "street")
COLUMNS, ROWS = 12, 8


@dataclass(frozen=True)
class Slides:
    """A family of tasks of our own: item i is the same everywhere."""

    min_points: int = 2
    max_points: int = 4
    crowded: float = 0.0  # share of solutions whose parts lie anywhere, also on each other and over the edge

    def __post_init__(self) -> None:
        if not 1 <= self.min_points <= self.max_points <= 4 or not 0 <= self.crowded <= 1:
            raise ValueError("there are 1 to 4 points, and crowded is a share between 0 and 1")

    def __getitem__(self, seed: int) -> dict[str, Any]:
        draw = random.Random(seed)
        points = [f"{draw.choice(FIRST)} {draw.choice(SECOND)}" for _ in range(self.max_points)]
        count = draw.randint(self.min_points, self.max_points)
        wanted = {"title": draw.choice(TITLES), "points": points[:count], "picture": draw.choice(PICTURES)}
        asked = f"Slide: {wanted['title']}\nPoints: {'; '.join(points[:count])}\nPicture: {wanted['picture']}"
        places = crowded(count, draw) if draw.random() < self.crowded else tidy(count, draw)
        return {"question": asked, "answer": written(wanted, places), "metadata": wanted}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """The share of what was asked for that is there, each in its kind of element, and nothing else."""
        wanted, page = entry["metadata"], Elements()
        page.feed(answer or "")
        page.close()
        asked = [("h1", wanted["title"]), *(("p", point) for point in wanted["points"]), ("img", wanted["picture"])]
        right = (Counter(asked) & Counter(page.found)).total()
        return right / max(len(asked), len(page.found))


Place = tuple[int, int, int, int]  # column, row, width, height; 0: as high as it is


def tidy(points: int, draw: random.Random) -> list[Place]:
    """The title on top, the points one below the other, the picture beside them, on either side."""
    left, first = draw.random() < 0.5, draw.randint(2, 3)
    text, image = (6, 1) if left else (1, 7)
    return [(1, 0, 10, 0), *((text, first + n, 5, 0) for n in range(points)), (image, 2, 4, draw.randint(3, 5))]


def crowded(points: int, draw: random.Random) -> list[Place]:
    """Anywhere."""
    texts = [(draw.randrange(9), draw.randrange(ROWS - 1), draw.randint(3, 6), 0) for _ in range(points)]
    picture = draw.randrange(9), draw.randrange(6), draw.randint(3, 7), draw.randint(2, 6)
    return [(draw.randrange(3), draw.randrange(2), 10, 0), *texts, picture]


def written(wanted: dict[str, Any], places: list[Place]) -> str:
    def place(number: int) -> str:
        x, y, wide, high = places[number]
        return f"x{x} y{y} w{wide}" + (f" h{high}" if high else "")

    points = [f'<p class="{place(1 + n)}">{escape(point)}</p>' for n, point in enumerate(wanted["points"])]
    picture = f'<img class="{place(-1)}" alt="{escape(wanted["picture"])}">'
    return "\n".join([f'<h1 class="{place(0)}">{escape(wanted["title"])}</h1>', *points, picture])


class Elements(HTMLParser):
    """Headings, paragraphs and pictures, by their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append((tag, dict(attrs).get("alt") or ""))
        elif tag in ("h1", "p"):
            self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.found.append((self.inside, " ".join(data.split())))
