"""What was said before, as the suffix tree of SRT (speculative rollouts with tree-structured cache): which tokens came
after a sequence of tokens, and how often.

The tree is not stored. An index leads from the last 1, 3 or 6 tokens to the places they were seen at; walking back from
those places finds the longest match, and walking on from them, all at once, visits the tree's nodes below it with
their counts. A token costs three entries when it is added, however much was seen before, and nothing is ever moved.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.serve.core.drafters import Draft

LENGTHS = (6, 3, 1)  # of the sequences in the index, longest first
PLACES = 16  # at most so many, the last ones, are looked at for one sequence
REACH = 16  # a longer match is no surer
ONCE = 0.89  # nothing that was seen at one place only is surer: a kind of guess of its own, judged by itself
LEAST = 0.02  # a guess less likely than this is not worth a row anywhere


# Of a match, by its length, against a weight of one for all that was never seen: six tokens are right in four of five.
WEIGHTS = [length**2 / 8 for length in range(REACH + 1)]


class Place(NamedTuple):
    """Before `text[number]`, where the last `length` tokens agreed. The text may still be growing."""

    text: Sequence[int]
    number: int
    length: int


class SuffixTree:
    def __init__(self) -> None:
        # Keys are hashes: a match is checked token by token, so a collision does no harm.
        self.places: dict[int, list[tuple[Sequence[int], int]]] = {}
        self.size = 0

    def add(self, text: Sequence[int], start: int, stop: int) -> None:
        """Tokens `start` to `stop` of a text are known now. The text is kept, not copied."""
        for number in range(max(start, 1), stop):
            place = (text, number)
            for length in LENGTHS:
                if length <= number:
                    known = self.places.setdefault(hash(tuple(text[number - length : number])), [])
                    known.append(place)
                    if len(known) >= 2 * PLACES:
                        del known[:PLACES]
        self.size += stop - start

    def match(self, text: Sequence[int]) -> list[Place]:
        """Where the end of a text was seen before, by the longest sequences that are known."""
        for length in LENGTHS:
            if length > len(text):
                continue
            known = self.places.get(hash(tuple(text[len(text) - length :])), ())
            found = [Place(other, number, agreeing(text, other, number)) for other, number in known[-PLACES:]]
            found = [place for place in found if place.length >= length]
            if found:
                return found
        return []


def agreeing(text: Sequence[int], other: Sequence[int], stop: int) -> int:
    """How many tokens before `other[stop]` are the last ones of a text; at most `REACH` are counted."""
    length = 0
    while length < min(REACH, stop, len(text)) and text[-1 - length] == other[stop - 1 - length]:
        length += 1
    return length


def expand(places: Sequence[Place], budget: int) -> Draft:
    """Best first: always the node that is likeliest to be reached, until the budget is spent."""
    draft = Draft()
    heap: list[tuple[float, int, int, int, float, list[Place]]] = []
    pushed = 0

    def push(parent: int, probability: float, places: Sequence[Place]) -> None:
        nonlocal pushed
        after: dict[int, list[Place]] = {}
        for text, number, length in places:
            if number < len(text):
                further = Place(text, number + 1, min(length + 1, REACH))
                after.setdefault(text[number], []).append(further)
        weights = {token: sum(WEIGHTS[place.length] for place in group) for token, group in after.items()}
        total = 1.0 + sum(weights.values())
        for token, group in after.items():
            odds = weights[token] / total
            if len(group) == 1:
                odds = min(odds, ONCE)
            if probability * odds >= LEAST:
                pushed += 1  # of equals the first goes first, and lists are never compared
                heapq.heappush(heap, (-probability * odds, pushed, token, parent, odds, group))

    push(-1, 1.0, places)
    while heap and len(draft) < budget:
        negative, _, token, parent, odds, group = heapq.heappop(heap)
        draft.tokens.append(token)
        draft.parents.append(parent)
        draft.odds.append(odds)
        push(len(draft) - 1, -negative, group)
    return draft
