"""What suites of questions share: ask them all, score every answer, give accuracy with a confidence interval."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.backends import Answer, Backend, EngineBackend
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.json_lines import json_lines
from moesaic.model.transformer import Model

SHOWN = 4  # questions that are shown with their answers


@dataclass(frozen=True)
class Question:
    text: str
    truth: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    kind: str = ""


class QuestionSuite(Suite):
    max_tokens: int
    needs_model = False
    takes_kv_policy = True

    @abstractmethod
    def questions(self, context: SuiteContext) -> list[Question]: ...

    @abstractmethod
    def judge(self, question: Question, text: str) -> float:
        """From 0 (wrong) to 1 (right)."""

    def answers(self, questions: Sequence[Question], model: Model | None, context: SuiteContext) -> list[Answer]:
        return answered([question.text for question in questions], self.max_tokens, model, context)

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        questions = self.questions(context)
        answers = self.answers(questions, model, context)
        texts = [answer.text.strip() for answer in answers]
        scores = [self.judge(question, text) for question, text in zip(questions, texts, strict=True)]
        low, high = wilson(sum(scores), len(scores))
        by_kind = means([question.kind for question in questions], scores)
        return {
            "accuracy": sum(scores) / len(scores),
            "accuracy_low": low,
            "accuracy_high": high,
            **({"by_kind": by_kind} if len(by_kind) > 1 else {}),
            "examples": len(scores),
            "answer_tokens": sum(one.tokens for one in answers) / len(scores),
            "samples": [
                {"question": question.text, "answer": text, "right": score >= 1.0, "expected": question.truth}
                for question, text, score in list(zip(questions, texts, scores, strict=True))[:SHOWN]
            ],
        }


@dataclass(frozen=True)
class FileQuestions(QuestionSuite):
    """Questions from the lines of a file."""

    examples: int = 0  # 0: the whole file
    max_tokens: int = 256

    takes_data = True

    def __post_init__(self) -> None:
        if self.examples < 0 or self.max_tokens < 1:
            raise ValueError("examples must be at least 0 (the whole file), and max_tokens at least 1")

    def check(self, data: Path | None) -> None:
        self.questions(SuiteContext(data))


def means(names: Iterable[str], scores: list[float]) -> dict[str, float]:
    """The mean score of each name."""
    found: dict[str, list[float]] = {}
    for name, one in zip(names, scores, strict=True):
        found.setdefault(name, []).append(one)
    return {name: sum(own) / len(own) for name, own in found.items()}


def answered(texts: Sequence[str], max_tokens: int, model: Model | None, context: SuiteContext) -> list[Answer]:
    """The answer to each text, asked all together, each as a conversation of its own."""
    answers: dict[int, Answer] = {}

    def on_answer(number: int, answer: Answer) -> None:
        if answer.out_of_context and not answer.tokens:
            problem = f"number {number + 1} does not fit in the model's context"
            raise UserError("questions", problem, "Shorten it.")
        answers[number] = answer
        context.progress(len(answers), len(texts))

    conversations = [[{"role": "user", "content": text}] for text in texts]
    backend_for(model, context).answer(conversations, max_tokens, on_answer)
    return [answers[number] for number in range(len(texts))]


def backend_for(model: Model | None, context: SuiteContext) -> Backend:
    """The backend that is named, or an engine over the model."""
    if context.backend is not None:
        return context.backend
    assert model is not None
    return EngineBackend(model, context.kv_policy)


def read_lines(file: Path | None, example: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place."""
    if file is None:
        raise UserError("--data", "is missing", f"Name a file of lines such as {example}")
    try:
        return list(json_lines(file))
    except UserError as error:
        raise UserError(error.place, error.problem, f"A line is such as {example}") from None


def text_under(line: dict[str, Any], place: str, *names: str) -> str:
    """The text under the first of some names that is there."""
    for name in names:
        if isinstance(line.get(name), str | int | float):
            return str(line[name])
    raise UserError(place, f"has no {' or '.join(names)}")
