"""Multiple choice from a file: which of the answers the model finds likeliest.

    moesaic evaluate out/model --suite choice --data questions.jsonl
    moesaic evaluate out/model --suite choice --data questions.jsonl normalised=true

A line is {"question": "The capital of France is", "choices": ["Paris", "Rome"], "answer": 0}; the answer may be given
as a letter (A is the first) or as the choice itself. No text is written: each choice's log-probability after the
question is summed, or, `normalised`, divided by its characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.questions import read_lines, text_under
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.model.transformer import Model

EXAMPLE = '{"question": "The capital of France is", "choices": ["Paris", "Rome"], "answer": 0}'
TOGETHER = 2048  # tokens of a forward


@dataclass(frozen=True)
class Choice(Suite):
    examples: int = 0  # 0: the whole file
    normalised: bool = False

    takes_data = True

    def __post_init__(self) -> None:
        if self.examples < 0:
            raise ValueError("examples must be at least 0 (the whole file)")

    def check(self, data: Path | None) -> None:
        self.lines(data)

    def lines(self, data: Path | None) -> list[tuple[str, list[str], int]]:
        return [read(line, place) for place, line in read_lines(data, EXAMPLE)[: self.examples or None]]

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        assert model is not None
        if model.tokenizer is None:
            raise UserError("model", "has no tokenizer", "Add tokenizer.json to its directory.")
        lines = self.lines(context.data)
        pieces: list[tuple[list[int], int]] = []  # tokens, and how many of them are the question's
        for question, choices, _ in lines:
            before = model.tokenizer.encode(question)
            for choice in choices:
                after = model.tokenizer.encode(f" {choice}", special=False)
                tokens = [*before, *after]
                if len(tokens) > model.config.context:
                    raise UserError(
                        context.data or "", f"a question of {len(tokens)} tokens does not fit in the context"
                    )
                pieces.append((tokens, len(before)))
        sums = likelihoods(model, pieces, context)
        right, place = 0, 0
        for _, choices, truth in lines:
            own = sums[place : place + len(choices)]
            place += len(choices)
            if self.normalised:
                own = [value / max(1, len(choice)) for value, choice in zip(own, choices, strict=True)]
            right += max(range(len(own)), key=own.__getitem__) == truth
        low, high = wilson(right, len(lines))
        return {"accuracy": right / len(lines), "accuracy_low": low, "accuracy_high": high, "examples": len(lines)}


def likelihoods(model: Model, pieces: list[tuple[list[int], int]], context: SuiteContext) -> list[float]:
    """The log-probability of what follows each question; several in one flat forward."""
    found: list[float] = []
    start = 0
    while start < len(pieces):
        stop, tokens = start, 0
        while stop < len(pieces) and (stop == start or tokens + len(pieces[stop][0]) <= TOGETHER):
            tokens += len(pieces[stop][0])
            stop += 1
        batch = pieces[start:stop]
        for logprobs, (_, before) in zip(model.logprobs([tokens for tokens, _ in batch]), batch, strict=True):
            found.append(float(logprobs[before - 1 :].double().sum()))
        start = stop
        context.progress(start, len(pieces))
    return found


def read(line: dict[str, Any], place: str) -> tuple[str, list[str], int]:
    question, choices, answer = text_under(line, place, "question", "prompt"), line.get("choices"), line.get("answer")
    if not question.strip():
        raise UserError(place, "the question is empty", f"A line is such as {EXAMPLE}")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise UserError(place, "choices is not a list of two texts or more", f"A line is such as {EXAMPLE}")
    if isinstance(answer, str) and answer in choices:
        return question, choices, choices.index(answer)
    if isinstance(answer, str) and len(answer) == 1 and answer.isalpha():
        answer = ord(answer.upper()) - ord("A")
    if not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise UserError(place, f"its answer {answer!r} is none of the choices")
    return question, choices, answer
