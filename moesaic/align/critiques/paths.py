"""Eval-Instruct (CritiqueLLM): from critiques of single answers with a reference, by several paths, to those of pairs
and those without a reference; paths that contradict each other are dropped.

    answers, with a reference  ->  without one  ->  pairs, without one      (path 1)
                               ->  pairs, with a reference                  (path 2)

And IF-CRITIC's critiques of a checklist, a constraint at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from moesaic.align.critiques.filters import Settled, side_of
from moesaic.align.critiques.items import Item, Tribunal, of_pair
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.constraints import verdicts
from moesaic.worlds.judges.critiques import Asking


@dataclass(frozen=True)
class Judged:
    """An answer with what code knows of it, from 0 to 1; None where code knows nothing."""

    answer: Answer
    truth: float | None

    @property
    def side(self) -> int | None:
        return None if self.truth is None else side_of(self.truth)


Found = Iterator[tuple[str, Item, Settled]]  # by the kind of critique
Told = dict[int, tuple[Item, Settled]]  # by the number of the answer


def single_answers(groups: Sequence[Sequence[Judged]], tribunal: Tribunal, asking: Asking, pairs: bool) -> Found:
    """Groups of answers to one question each: all of them alone, then in pairs."""
    everyone = [one for group in groups for one in group]
    with_reference = [Item(asking, one.answer, one.side) for one in everyone]
    referenced = _settled(with_reference, tribunal)
    for item, found in referenced.values():
        yield "referenced" if has_reference(item) else "pointwise", item, found
    free = replace(asking, reference=False)
    revised = {
        number: Item(free, item.answer, item.truth, {"Critique by one who knew the reference answer": found.kept[0]})
        for number, (item, found) in referenced.items()
        if has_reference(item)
    }
    told = _settled(list(revised.values()), tribunal, list(revised))
    for number in [number for number, (_, found) in told.items() if found.side != referenced[number][1].side]:
        tribunal.drop("paths_contradict")
        del told[number]
    for item, found in told.values():
        yield "pointwise", item, found
    if pairs:
        told |= {number: one for number, one in referenced.items() if not has_reference(one[0])}
        yield from _pairs(groups, tribunal, asking, referenced, told)


def _pairs(
    groups: Sequence[Sequence[Judged]], tribunal: Tribunal, asking: Asking, referenced: Told, told: Told
) -> Found:
    """Of answers on different sides, one pair for each question and side; what their own critiques say of them is known
    to whoever compares them."""
    compare = replace(asking, form="pairwise", both_orders=False)
    by_paths: list[tuple[Item, Item, int]] = []
    first = 0
    for group in groups:
        numbers = range(first, first + len(group))
        first += len(group)
        for one, two in _different(numbers, referenced, swapped=len(by_paths) % 2 == 1):
            shown = of_pair(referenced[one][0].answer, referenced[two][0].answer)
            side = referenced[one][1].side
            known = None if referenced[one][0].truth is None else _better(referenced[one][0], referenced[two][0])
            ways = []
            for asked, critiques in ((compare, referenced), (replace(compare, reference=False), told)):
                written = {"A": critiques.get(one), "B": critiques.get(two)}
                notes = {f"Critique of answer {name}": own[1].kept[0] for name, own in written.items() if own}
                ways.append(Item(asked, shown, known, notes))
            by_paths.append((ways[0], ways[1], side))
    with_reference = tribunal.settle([item for item, _, _ in by_paths])
    without = tribunal.settle([item for _, item, _ in by_paths])
    for (item, free, side), found, other in zip(by_paths, with_reference, without, strict=True):
        if found is None or other is None:
            continue
        if not found.side == other.side == side:
            tribunal.drop("paths_contradict")
            continue
        if has_reference(item):
            yield "pairwise_referenced", item, found
        yield "pairwise", free, other


def checklists(everyone: Sequence[Judged], tribunal: Tribunal, asking: Asking) -> Found:
    """Every constraint of every answer by itself, so that what is filtered is one constraint and not a whole list."""
    items = [item for one in everyone for item in by_constraint(one.answer, asking)]
    for item, found in zip(items, tribunal.settle(items), strict=True):
        if found is not None:
            yield "checklist", item, found


def by_constraint(answer: Answer, asking: Asking) -> Iterator[Item]:
    for constraint in answer.facts.get("constraints", ()):
        if "text" in constraint:
            alone = replace(answer, facts={**answer.facts, "constraints": [constraint]})
            yield Item(replace(asking, form="checklist"), alone, by_code(answer.text, constraint))


def by_code(text: str, constraint: dict[str, Any]) -> int | None:
    """The side of a constraint that a rule can check."""
    if "kind" not in constraint:
        return None
    (verdict,) = verdicts(text, [{**constraint, "weight": 1.0}])
    return 1 if verdict.kept else -1


def _settled(items: Sequence[Item], tribunal: Tribunal, numbers: Sequence[int] | None = None) -> Told:
    found = tribunal.settle(items)
    places = range(len(items)) if numbers is None else numbers
    return {n: (item, one) for n, item, one in zip(places, items, found, strict=True) if one is not None}


def _different(numbers: range, settled: Told, swapped: bool) -> Iterator[tuple[int, int]]:
    """The first pair of answers that are not equally good; the better one is not always the first."""
    for one, two in combinations([number for number in numbers if number in settled], 2):
        sides = settled[one][1].side, settled[two][1].side
        if 0 not in sides and sides[0] != sides[1]:
            better, worse = (one, two) if sides[0] > sides[1] else (two, one)
            yield (worse, better) if swapped else (better, worse)
            return


def _better(one: Item, two: Item) -> int | None:
    return None if one.truth is None or two.truth is None else (one.truth > two.truth) - (one.truth < two.truth)


def has_reference(item: Item) -> bool:
    return item.asking.reference and item.answer.facts.get("reference", item.answer.truth) is not None
