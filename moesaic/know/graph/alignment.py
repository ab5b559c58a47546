"""Which names mean one entity: within a document (surnames, acronyms, titles), and between documents.

Between documents two names of one key (`names.key`) are one entity; names that probably mean the same (a title in
parentheses, an acronym, near vectors: KAG's semantic alignment) stay two, joined by an edge.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from moesaic.know.graph.names import FUNCTION_WORDS, key, without_parentheses

ACRONYM = re.compile(r"\s\(([A-Z][A-Z&.]{1,9})\)")


class WithinDocument:
    """Names of one document, in the order they are met: a short one means the long one that was named before."""

    def __init__(self, titles: Iterable[str] = ()) -> None:
        self._by_word: dict[str, list[str]] = defaultdict(list)
        self._known: set[str] = set()
        for title in titles:
            self.meet(without_parentheses(title))

    def meet(self, name: str) -> str:
        """The full name, which is `name` itself where nothing longer is known. One word is a surname or a first name
        of exactly one name of two to four words; of two, it means neither."""
        if name in self._known:
            return name
        words = name.split(" ")
        if len(words) == 1:
            long = self._by_word.get(name, ())
            return long[0] if len(long) == 1 else name
        self._known.add(name)
        if len(words) <= 4 and not any(word.lower() in FUNCTION_WORDS for word in words):
            for word in {words[0], words[-1]}:
                self._by_word[word].append(name)
        return name


def initials(name: str) -> str:
    return "".join(word[0] for word in re.split(r"[\s-]+", name) if word[:1].isupper())


def acronyms_in(text: str) -> dict[str, str]:
    """Acronyms that a text introduces, "American Institute of Physics (AIP)", and what they are short for."""
    found: dict[str, str] = {}
    for match in ACRONYM.finditer(text):
        short = match[1].replace(".", "")
        words = text[max(0, match.start() - 120) : match.start()].split()[-2 * len(short) :]
        for first in range(len(words) - 1, -1, -1):
            long = " ".join(words[first:]).strip('"“”,;:(')
            if words[first][:1] == short[0] and initials(long) == short.replace("&", "") and len(short) > 1:
                found[short] = long
                break
    return found


def alike(keys: Sequence[str], names: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of entities whose names probably mean the same: "Lilu (mythology)" and "Lilu", a name and its acronym."""
    place = {each: number for number, each in enumerate(keys)}
    pairs: set[tuple[int, int]] = set()
    short: dict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(names):
        if name.endswith(")"):
            other = place.get(key(without_parentheses(name)))
            if other is not None and other != number:
                pairs.add((min(number, other), max(number, other)))
        if name.count(" ") >= 2:
            letters = initials(name)
            if len(letters) >= 3 and letters.lower() in place:
                short[letters.lower()].append(number)
    for letters, numbers in short.items():
        other = place[letters]
        if len(numbers) == 1 and names[other].isupper() and numbers[0] != other:
            pairs.add((min(numbers[0], other), max(numbers[0], other)))
    return sorted(pairs)


def near(keys: Sequence[str], vectors: np.ndarray, least: float = 0.85, most: int = 200) -> list[tuple[int, int]]:
    """Pairs whose vectors (of length one) are near. Only names that share a word are compared, so that the time stays
    about linear; a word of more than `most` names compares none."""
    by_word: dict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(keys):
        for word in set(each.split()):
            if len(word) > 2 and word not in FUNCTION_WORDS:
                by_word[word].append(number)
    pairs: set[tuple[int, int]] = set()
    for numbers in by_word.values():
        if 1 < len(numbers) <= most:
            block = np.asarray(vectors[numbers], dtype=np.float32)
            left, right = np.nonzero(np.triu(block @ block.T, 1) >= least)
            pairs.update((numbers[a], numbers[b]) for a, b in zip(left, right, strict=True))
    return sorted(pairs)


def merged(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of names with one key together, under the first spelling."""
    spelling: dict[str, str] = {}
    total: dict[str, int] = {}
    for name, count in counts.items():
        first = spelling.setdefault(key(name), name)
        total[first] = total.get(first, 0) + count
    return total
