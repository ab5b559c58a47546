"""Pairs of answers, the first better than the second: from JSON lines, or a task's right answer against a wrong one.

    {"prompt": "2 + 3 =", "chosen": "5", "rejected": "6"}
    {"messages": [...], "tools": [...], "chosen": [{"role": "assistant", ...}, ...], "rejected": "...", "margin": 0.5}

Without prompt and messages, chosen and rejected are whole conversations, and what both begin with is the question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.align.conversation import Said, read_conversation
from moesaic.align.examples import BUILTIN, TaskExamples, check_tools, read_messages
from moesaic.data.tasks import Split, score
from moesaic.errors import UserError
from moesaic.json_lines import json_lines
from moesaic.model.tokenizer import Tokenizer

TRIES = 50  # other tasks that are asked for a wrong answer


@dataclass(frozen=True)
class Pair:
    """`number` is its own among all pairs of a stage."""

    number: int
    chosen: Said
    rejected: Said
    margin: float = 0.0  # by how much the first should be better, where that is known
    weight: float = 1.0

    @property
    def sides(self) -> tuple[Said, Said]:
        return self.chosen, self.rejected


def questions_and_answers(line: Mapping[str, Any], place: str) -> tuple[list[Any], list[list[Any]]]:
    """The messages of the question, and those of the chosen and of the rejected answer."""
    answers = []
    for side in ("chosen", "rejected"):
        found = line.get(side)
        if not found:
            problem = f"has no {side} answer" if found is None else f"its {side} answer is empty"
            raise UserError(place, problem, 'A pair is {"prompt": ..., "chosen": ..., "rejected": ...}.')
        answers.append(_messages(found, place, side))
    if "messages" in line or "prompt" in line:
        asked = line.get("messages", line.get("prompt"))
        question = [{"role": "user", "content": asked}] if isinstance(asked, str) else _messages(asked, place, "prompt")
        if not question:
            raise UserError(place, "messages is empty", "Say what was asked.")
        return question, answers
    shorter = min(map(len, answers))
    same = next((n for n in range(shorter) if answers[0][n] != answers[1][n]), shorter)
    while same and answers[0][same - 1].get("role") == "assistant":
        same -= 1  # an answer both begin with belongs to the answers
    if not same:
        raise UserError(place, "has neither messages nor a prompt", "Say what was asked.")
    return answers[0][:same], [answer[same:] for answer in answers]


def _messages(found: Any, place: str, name: str) -> list[Any]:
    if isinstance(found, str):
        return [{"role": "assistant", "content": found}]
    found = [found] if isinstance(found, dict) else found
    return read_messages(found, place, f"{name} is neither text nor a list")


def answered(tokenizer: Tokenizer, question: Sequence[Any], answer: Sequence[Any], tools: Any, place: str) -> Said:
    """A question with an answer to it (which may call tools, and read what they say); the answer alone is learned."""
    try:
        parts = read_conversation(tokenizer, [*question, *answer], tools, since=len(question))
    except UserError as error:
        raise UserError(place, error.problem, error.remedy) from None
    if len(parts) > 1:
        problem = "an answer of several turns, which the chat template does not show as they were said"
        raise UserError(place, problem, "Make a pair of each turn.")
    return parts[0]


def check_pair(line: Mapping[str, Any], place: str) -> tuple[list[Any], list[list[Any]]]:
    """The question and the answers, if all that can be seen of a line without a tokenizer is right."""
    question, answers = questions_and_answers(line, place)
    for side, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not any(message["role"] == "assistant" for message in answer):
            problem = f"its {side} answer holds nothing that an assistant said"
            raise UserError(place, problem, "Add a message of role assistant.")
    margin = line.get("margin", 0.0)
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not math.isfinite(margin):
        raise UserError(place, f"its margin is {margin!r}", "A margin is a number.")
    check_tools(line.get("tools"), place)
    return question, answers


def read_pair(tokenizer: Tokenizer, line: Mapping[str, Any], place: str, number: int) -> Pair:
    question, answers = check_pair(line, place)
    chosen, rejected = (answered(tokenizer, question, answer, line.get("tools"), place) for answer in answers)
    return Pair(number, chosen, rejected, float(line.get("margin", 0.0)))


def task_pair(tokenizer: Tokenizer, family: str, tasks: TaskExamples, index: int, number: int) -> Pair:
    """The right answer, and as the wrong one what is right elsewhere."""
    example = tasks[index]
    place = f"{BUILTIN}{family}"
    if example.task is None or example.answer is None:
        raise UserError(place, "gives no answers to compare", "Choose another family.")
    for further in range(1, TRIES):
        other = tasks[index + further]
        if other.answer is not None and other.truth != example.truth and score(example.task, other.truth) < 1.0:
            texts = [{"role": "assistant", "content": text} for text in (example.answer, other.answer)]
            chosen, rejected = (answered(tokenizer, example.messages, [text], None, place) for text in texts)
            return Pair(number, chosen, rejected)
    raise UserError(place, "all answers are right everywhere", "Choose another family.")


def read_source(
    tokenizer: Tokenizer, path: str, split: Split, max_pairs: int, max_length: int, first: int = 0, seed: int = 0
) -> tuple[list[Pair], int]:
    """The pairs of one source, numbered from `first`, and how many were left out because they are too long. To train
    on, every seed has tasks of its own."""
    pairs: list[Pair] = []
    if path.startswith(BUILTIN):
        family = path.removeprefix(BUILTIN)
        tasks = TaskExamples(family, split)
        begin = tasks.first_of(seed) if split == "train" else 0
        pairs = [task_pair(tokenizer, family, tasks, begin + index, first + index) for index in range(max_pairs)]
    else:
        for place, line in json_lines(Path(path)):
            pairs.append(read_pair(tokenizer, line, place, first + len(pairs)))
    short = [pair for pair in pairs if max(len(side.tokens) for side in pair.sides) <= max_length]
    if not short:
        raise UserError(path, f"no pair is as short as {max_length} tokens", "Raise the stage's max_length.")
    return short, len(pairs) - len(short)


def check_pairs(
    data: Sequence[Mapping[str, Any]], check: Callable[[Mapping[str, Any], str], object] = check_pair
) -> None:
    """What can be seen to be wrong without a tokenizer, by what checks a line."""
    for source in data:
        if source["path"].startswith(BUILTIN):
            TaskExamples(source["path"].removeprefix(BUILTIN), "train")
            continue
        for place, line in json_lines(Path(source["path"])):
            check(line, place)
