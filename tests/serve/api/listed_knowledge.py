"""A knowledge base that is a list of texts, searched by the words they share with a query."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

from moesaic.serve.api.know.citing import cited
from moesaic.serve.api.knowledge import Citation, Knowledge, Passage

TEXTS = [
    ("rivers.md", "Rivers", "The Danube rises in the Black Forest. It ends in the Black Sea."),
    ("cities.md", "Cities", "Vienna lies on the Danube. Graz lies on the Mur."),
    ("food/bread.txt", "Bread", "Bread is made of flour, water and salt."),
]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class ListedKnowledge:
    """`seen` are the searches that were made, and on which threads."""

    methods: Sequence[str] = ("words", "vectors")

    def __init__(self, texts: Sequence[tuple[str, str, str]] = TEXTS, offset: int = 100) -> None:
        self.passages = [
            Passage(f"p{number}", source, title, text, offset, offset + len(text), document=f"d{number}")
            for number, (source, title, text) in enumerate(texts)
        ]
        self.seen: list[tuple[str, int, str]] = []
        self.threads: set[str] = set()

    @property
    def rows(self) -> int:
        return len(self.passages)

    def search(self, query: str, k: int, method: str) -> list[Passage]:
        self.seen.append((query, k, method))
        self.threads.add(threading.current_thread().name)
        order = sorted(self.passages, key=lambda one: -len(words(query) & words(one.text)))
        return order[:k]

    def fetch(self, name: str) -> Passage | None:
        return next((one for one in self.passages if one.id == name), None)

    def cite(self, question: str, answer: str, passages: Sequence[Passage]) -> list[Citation]:
        return cited(answer, passages)


KNOWLEDGE: Knowledge = ListedKnowledge()  # as the type checker sees it
