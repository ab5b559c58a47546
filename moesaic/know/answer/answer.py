"""An answer as it is handed back: statements with citations and quotes, what was dropped and why, and what was read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moesaic.know.answer.choose import Passage
from moesaic.know.answer.citations import Citation, Dropped, Statement

NOT_IN_TEXTS = "Not in the texts."


@dataclass(frozen=True)
class Round:
    """A follow-up question of i-MedRAG and what came of it."""

    number: int
    query: str
    answer: str
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    question: str
    statements: tuple[Statement, ...]
    passages: tuple[Passage, ...]
    written: str  # what the model wrote, before it was checked
    rounds: tuple[Round, ...] = ()
    why_not: str | None = None  # why there is none

    @property
    def abstained(self) -> bool:
        return self.why_not is not None

    @property
    def text(self) -> str:
        """Supported statements with their citations; others are marked."""
        return NOT_IN_TEXTS if self.abstained else " ".join(map(str, self.statements))

    @property
    def citations(self) -> list[Citation]:
        """Each once, in the order of the text."""
        return list(dict.fromkeys(c for statement in self.statements for c in statement.citations))

    @property
    def dropped(self) -> list[Dropped]:
        return [dropped for statement in self.statements for dropped in statement.dropped]

    @property
    def unsupported(self) -> list[str]:
        return [statement.text for statement in self.statements if not statement.supported]

    def record(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "question": self.question,
            "text": self.text,
            "abstained": self.abstained,
            "why_not": self.why_not,
            "citations": [asdict(citation) for citation in self.citations] if not self.abstained else [],
            "unsupported": self.unsupported,
            "dropped": [asdict(dropped) for dropped in self.dropped],
            "written": self.written,
            "rounds": [asdict(one) for one in self.rounds],
            "passages": [
                {
                    "number": passage.number,
                    "source": passage.chunk.source,
                    "title": passage.chunk.title,
                    "chunk": passage.chunk.id,
                    "shown": passage.shown,
                }
                for passage in self.passages
            ],
        }
