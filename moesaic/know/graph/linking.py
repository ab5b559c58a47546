"""Which entities of a graph a question names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from moesaic.know.graph.names import FUNCTION_WORDS, HAN, key, scan

LONGEST = 10  # words of a name
WORD = re.compile(r"[^\s\"“”«»()\[\],:;!?*]+")


class Linker:
    def __init__(self, places: Mapping[str, int]) -> None:
        self.places = places  # entity by key
        self._by_word: dict[str, list[int]] | None = None
        self._keys: Sequence[str] = list(places)

    def mentioned(self, text: str) -> dict[int, float]:
        """Entities in `text` and how surely each is meant: the longest names that are known, first to last; and for a
        capitalised name that is not known as such, those that hold all its words, which share one weight."""
        found: dict[int, float] = {}
        words = [match[0] for match in WORD.finditer(text)]
        small = [key(word) for word in words]
        at = 0
        linked: set[int] = set()
        while at < len(words):
            for size in range(min(LONGEST, len(words) - at), 0, -1):
                name = " ".join(filter(None, small[at : at + size]))
                number = self.places.get(name)
                if number is not None and _names(words[at : at + size], first=at == 0):
                    found[number] = 1.0
                    linked.update(range(at, at + size))
                    at += size
                    break
            else:
                at += 1
        for mention in scan(text):
            name = key(mention.text)
            if mention.kind not in ("name", "quoted", "code") or not name:
                continue
            exact = self.places.get(name)
            if exact is not None:
                found[exact] = 1.0
            elif not set(name.split()) <= {small[number] for number in linked}:
                for number in (holding := self._holding(name)):
                    found[number] = max(found.get(number, 0.0), 1.0 / len(holding))
        for run in HAN.findall(text):
            for size in range(min(8, len(run)), 1, -1):
                for start in range(len(run) - size + 1):
                    number = self.places.get(run[start : start + size])
                    if number is not None:
                        found.setdefault(number, 1.0)
        return found

    def _holding(self, name: str, most: int = 10) -> list[int]:
        if self._by_word is None:
            by_word: dict[str, list[int]] = defaultdict(list)
            for number, each in enumerate(self._keys):
                for word in set(each.split()):
                    by_word[word].append(number)
            self._by_word = by_word
        words = [word for word in name.split() if word not in FUNCTION_WORDS]
        lists = sorted((self._by_word.get(word, []) for word in words), key=len)
        if not lists or not lists[0]:
            return []
        both = set(lists[0]).intersection(*lists[1:])
        return sorted(both) if len(both) <= most else []


def _names(words: Sequence[str], first: bool) -> bool:
    """Whether words that a graph knows as a name are meant as one here: some are capitalised, or there are several."""
    content = [word for word in words if word.lower() not in FUNCTION_WORDS]
    if not content:
        return False
    if any(word[:1].isupper() for word in (content[1:] if first and len(content) > 1 else content)):
        return not (first and len(words) == 1 and words[0].lower() in FUNCTION_WORDS)
    return (
        len(content) > 1
        or any(char.isdigit() or char in "_." for char in content[0].rstrip("."))
        or not content[0].isascii()
    )
