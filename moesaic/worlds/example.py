"""An example: a prompt as messages, and what is known of its right answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moesaic.data.tasks import Task
from moesaic.errors import UserError


@dataclass(frozen=True)
class Example:
    """A question as messages; the answer that is right, or that is to be learned, where one is known."""

    messages: tuple[dict[str, Any], ...]
    answer: str | None = None
    task: Task | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    place: str = ""  # file:line, where it was read from one

    @property
    def question(self) -> str:
        return str(self.messages[-1].get("content", "")) if self.messages else ""

    @property
    def truth(self) -> str | None:
        """The right answer, without the way to it."""
        return self.task.answer if self.task is not None else self.answer

    @contextmanager
    def at_its_place(self) -> Iterator[None]:
        """Whatever is found wrong with it (by a chat template, say) is told with the line it was read from."""
        try:
            yield
        except UserError as error:
            raise UserError(self.place or error.place, error.problem, error.remedy) from None

    def conversation(self) -> list[dict[str, Any]]:
        """The question with its answer, as it is to be said."""
        if self.answer is None:
            return list(self.messages)
        return [*self.messages, {"role": "assistant", "content": self.answer}]
