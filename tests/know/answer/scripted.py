"""Stand-ins: a writer that says what it is told to, and chunks that are searched by the words they share."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.know.answer.writer import Conversation, Form
from moesaic.know.chunk import Chunk, Hit


class Scripted:
    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[Conversation] = []
        self.forms: list[Form | None] = []

    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        self.asked += conversations
        self.forms += [form] * len(conversations)
        return [self.texts.pop(0) for _ in conversations]


def chunk(title: str, text: str, start: int = 0) -> Chunk:
    return Chunk(f"{title}-{start}", title, f"{title}.txt", title, text, start, start + len(text))


class Shelf:
    """Chunks with at least one word of the query, most words first."""

    def __init__(self, *texts: tuple[str, str]) -> None:
        self.chunks = [chunk(title, text) for title, text in texts]

    def search(self, query: str, k: int = 8) -> list[Hit]:
        words = set(query.lower().strip("?").split())
        scored = [
            (len(words & set(f"{one.title} {one.text}".lower().replace(".", "").split())), -row, one)
            for row, one in enumerate(self.chunks)
        ]
        return [
            Hit(one, -row, float(score)) for score, row, one in sorted(scored, key=lambda s: s[:2])[::-1][:k] if score
        ]
