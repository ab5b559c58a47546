"""A player of riddles that halves what is possible with every question; programmers who know all faults and kernels."""

from __future__ import annotations

import re
from collections.abc import Generator

from moesaic.worlds.environments.lateral import PARTS
from moesaic.worlds.faulty_programs import ROUTINES
from tests.worlds.kernel_solutions import SOLUTIONS
from tests.worlds.matching import matched


def lateral(opening: str) -> Generator[str, str, None]:
    clues = matched(r"people say: (.+)\. A place that is (.+)\.", opening)
    found = []
    for part, clue in zip(PARTS, (*clues, None, None), strict=True):
        left = {value: tags for value, tags in PARTS[part].items() if clue is None or clue in tags}
        while len(left) > 1:
            tags = {tag for tags in left.values() for tag in tags}
            halves = {tag: sum(tag in own for own in left.values()) for tag in sorted(tags)}
            tag = min(halves, key=lambda tag: abs(halves[tag] - len(left) / 2))
            if halves[tag] in (0, len(left)):
                value = next(iter(left))
                said = yield f"ask Was it the {value}?"
                left = {value: left[value]} if said == "Yes." else {v: t for v, t in left.items() if v != value}
                continue
            said = yield f"ask Is it true that it is {tag}?"
            left = {value: own for value, own in left.items() if (tag in own) == (said == "Yes.")}
        found.append(next(iter(left)))
    yield f"solve {', '.join(found)}"


def repair(opening: str) -> Generator[str, str, None]:
    """Looks at which function fails, then for a line of it that is known to be wrong."""
    failed = yield "test"
    name = matched(r"^(\w+)\(", failed)[0]
    (routine,) = (routine for routine in ROUTINES if routine.name == name)
    for right, wrong in routine.faults:
        for number, blanks, line in re.findall(r"^(\d+): ( *)(.+)$", opening, re.M):
            if line == wrong:
                yield f"replace {number}: {blanks}{right}"
    yield "submit"


def kernel(opening: str) -> Generator[str, str, None]:
    name = matched(r"The function to write: (\w+)\(", opening)[0]
    yield f"```python\n{SOLUTIONS[name]}```"
