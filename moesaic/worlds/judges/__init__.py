"""What judges an answer: where in a text it stands, whether it is the same mathematics, which constraints it keeps.

Rewards are made of these when a model is trained (`align/rewards`), scores when it is evaluated (`evaluate/suites`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.data.tasks import Task


@dataclass(frozen=True)
class Answer:
    """What a model said, and what is known about the question."""

    question: str
    text: str
    tokens: int = 0
    finish_reason: str = "stop"
    truth: str | None = None  # the right answer, where there is one
    task: Task | None = None  # where the question came from a family of tasks
    facts: dict[str, Any] = field(default_factory=dict)  # what else came with the question: tests, schema, constraints
    messages: tuple[dict[str, Any], ...] = ()  # all that was said before, where the question was not all
    replies: Mapping[str, str] = field(default_factory=dict)  # of the model, to what a reward asked it of its answer

    @property
    def asked(self) -> list[dict[str, Any]]:
        return list(self.messages) or [{"role": "user", "content": self.question}]
