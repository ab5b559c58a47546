"""The suffix tree of SRT (speculative rollouts with tree-structured cache): which tokens followed a sequence of tokens
in earlier texts, and how often.

The tree is not stored. An n-gram index leads from the last 1, 3 or 6 tokens to the places where they occurred; walking
back from those places finds the longest match, and walking on from them, all at once, visits the tree's nodes below it
with their counts. A token costs three entries when it is added, however long the texts are, and nothing is ever moved.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.serve.core.drafters import Draft

NGRAMS = (6, 3, 1)  # lengths in the index, longest first
MAX_PLACES = 16  # of one n-gram, the last ones
MAX_MATCH = 16  # a longer match is no surer
MAX_ONCE = 0.89  # confidence after a single occurrence: a bin of its own in the acceptance rates
MIN_PROBABILITY = 0.02  # a draft token less likely than this is not worth a row anywhere


# Of a match, by its length, against a weight of one for all that never occurred: six tokens are right in four of five.
WEIGHTS = [length**2 / 8 for length in range(MAX_MATCH + 1)]


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
            for length in NGRAMS:
                if length <= number:
                    known = self.places.setdefault(hash(tuple(text[number - length : number])), [])
                    known.append(place)
                    if len(known) >= 2 * MAX_PLACES:
                        del known[:MAX_PLACES]
        self.size += stop - start

    def match(self, text: Sequence[int]) -> list[Place]:
        """Where the end of a text occurred before, by the longest n-gram that is in the index."""
        for length in NGRAMS:
            if length > len(text):
                continue
            known = self.places.get(hash(tuple(text[len(text) - length :])), ())
            found = [Place(other, number, agreeing(text, other, number)) for other, number in known[-MAX_PLACES:]]
            found = [place for place in found if place.length >= length]
            if found:
                return found
        return []


def agreeing(text: Sequence[int], other: Sequence[int], stop: int) -> int:
    """How many tokens before `other[stop]` are the last ones of a text; at most `MAX_MATCH` are counted."""
    length = 0
    while length < min(MAX_MATCH, stop, len(text)) and text[-1 - length] == other[stop - 1 - length]:
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
                further = Place(text, number + 1, min(length + 1, MAX_MATCH))
                after.setdefault(text[number], []).append(further)
        weights = {token: sum(WEIGHTS[place.length] for place in group) for token, group in after.items()}
        total = 1.0 + sum(weights.values())
        for token, group in after.items():
            confidence = weights[token] / total
            if len(group) == 1:
                confidence = min(confidence, MAX_ONCE)
            if probability * confidence >= MIN_PROBABILITY:
                pushed += 1  # of equals the first goes first, and lists are never compared
                heapq.heappush(heap, (-probability * confidence, pushed, token, parent, confidence, group))

    push(-1, 1.0, places)
    while heap and len(draft) < budget:
        negative, _, token, parent, confidence, group = heapq.heappop(heap)
        draft.tokens.append(token)
        draft.parents.append(parent)
        draft.confidence.append(confidence)
        push(len(draft) - 1, -negative, group)
    return draft
