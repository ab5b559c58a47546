"""How a knowledge base is searched: each method, and what `auto` means for what a base has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moesaic.errors import UserError
from moesaic.know.knowledge_base import KnowledgeBase
from tests.know.search.test_mutual import TEXTS

QUESTION = "Who is the spouse of the performer of the album Green?"


class Letters:
    """Vectors of which letters a text has."""

    name, dimensions = "letters", 26

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], dtype=np.float32)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)

    def embed_query(self, text: str) -> np.ndarray:
        found: np.ndarray = self.embed([text])[0]
        return found


def titles(base: KnowledgeBase, method: str, k: int = 4) -> list[str]:
    return [hit.chunk.title for hit in base.search(QUESTION, k, method)]


def test_every_method_and_what_auto_is() -> None:
    with KnowledgeBase.of_texts(TEXTS, Letters()) as base:
        assert "Steve Hillage" not in titles(base, "words", 6)
        assert "Steve Hillage" in titles(base, "mutual")
        assert titles(base, "auto") == titles(base, "mutual")
        assert set(base.search(QUESTION, 1, "mutual")[0].parts) == {"words", "vectors", "graph"}
        for method in ("words", "vectors", "fusion", "mutual", "neural"):
            scores = [hit.score for hit in base.search(QUESTION, 6, method)]
            assert scores == sorted(scores, reverse=True) and len(scores) >= 3
    with KnowledgeBase.of_texts(TEXTS, Letters(), extract="none") as base:
        assert titles(base, "auto") == titles(base, "fusion")
    with KnowledgeBase.of_texts(TEXTS, extract="none") as base:
        assert titles(base, "auto") == titles(base, "words")


def test_what_a_base_lacks_is_said() -> None:
    with KnowledgeBase.of_texts(TEXTS, extract="none") as base:
        with pytest.raises(UserError, match="has no graph"):
            base.search(QUESTION, method="mutual")
        with pytest.raises(UserError, match="neural: .* has no graph"):
            base.search(QUESTION, method="neural")
        with pytest.raises(UserError, match="has none"):
            base.search(QUESTION, method="fusion")
        with pytest.raises(UserError, match="not one of"):
            base.search(QUESTION, method="best")


def test_a_base_of_nothing() -> None:
    with KnowledgeBase.of_texts([]) as base:
        assert base.search(QUESTION) == base.search(QUESTION, method="neural") == []
