"""What writes text for the knowledge room: an engine in this process, or any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Form:
    """What an answer must look like; at most one of the two. A small model cannot break it."""

    schema: Mapping[str, Any] | None = None  # JSON Schema
    grammar: str | None = None  # Lark, as llguidance reads it


class Writer(Protocol):
    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        """One text for each conversation, in order; all are written together."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A writer that knows how much it can read."""

    @property
    def context(self) -> int:
        """Tokens of a conversation and its answer together."""
        ...

    def count(self, conversation: Conversation) -> int:
        """Tokens of a conversation, opened for the answer."""
        ...
