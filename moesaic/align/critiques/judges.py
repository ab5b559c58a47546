"""Who writes critiques: an engine in this process, or a server. Many are asked at once; in an engine, what cannot be
asked costs only itself its critique.

    judge = EngineJudge("out/critic")
    judge.replies([Question("=== Question ===...", 'start: "Rating: [[" /[1-9]/ "]]"', 24)], temperature=0.0)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from moesaic.know.answer.writer import Form
from moesaic.know.answer.writers import ServerWriter
from moesaic.model import directory
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling
from moesaic.worlds.completions import prompt_tokens
from moesaic.worlds.judges.answer_part import after_thought

AT_ONCE = 128  # critiques that an engine writes together
ASKED_AT_ONCE = 16  # of a server


@lru_cache(maxsize=64)
def _grammar(text: str) -> Grammar:
    return Grammar.lark(text, "critique")


@dataclass(frozen=True)
class Question:
    """For a judge. What it judges is data: no special token that it spells out is one."""

    prompt: str
    grammar: str  # of the reply
    max_tokens: int
    seed: int = 0


Reply = str | Exception


class Judge(Protocol):
    def replies(self, questions: Sequence[Question], temperature: float) -> list[Reply]:
        """One for each question, or why there is none."""
        ...


class EngineJudge:
    """Holds a judge to the grammar. What questions have in common at their beginning is computed once."""

    def __init__(self, judge: Engine | str | Path) -> None:
        """Or the directory of a model, which is opened when it is asked: whoever only names it need not hold it."""
        self._judge = judge
        self._turn = threading.Lock()  # groups are judged side by side, and an engine belongs to one

    def replies(self, questions: Sequence[Question], temperature: float) -> list[Reply]:
        with self._turn:
            engine = self._judge = opened(self._judge)
            found: list[Reply] = []
            asked: list[tuple[int, Request]] = []
            for number, question in enumerate(questions):
                try:
                    asked.append((number, request_for(engine, question, temperature)))
                    found.append("")
                except Exception as error:  # whatever a tokenizer, a template or a grammar may come up with
                    found.append(error)
            done = engine.complete([request for _, request in asked])
            for (number, _), completion in zip(asked, done, strict=True):
                found[number] = completion.text
            return found


def opened(judge: Engine | str | Path) -> Engine:
    """Invariant: a critique does not depend on what else is judged, so that a run resumes to the same bits."""
    if isinstance(judge, Engine):
        return judge
    model = directory.load(judge, threads=torch.get_num_threads(), mode="invariant")
    return Engine(model.requires_grad_(False), max_requests=AT_ONCE, seed=0)


def request_for(engine: Engine, question: Question, temperature: float) -> Request:
    assert engine.tokenizer is not None
    tokens = prompt_tokens(engine.tokenizer, [{"role": "user", "content": question.prompt}])
    if len(tokens) + question.max_tokens > engine.max_length:
        held = engine.max_length
        raise ValueError(f"{len(tokens)} tokens and a critique are more than the {held} that the judge holds")
    grammar = _grammar(question.grammar)
    return engine.request(tokens, Sampling(question.max_tokens, temperature, seed=question.seed, grammar=grammar))


class ServerJudge:
    """Any OpenAI-compatible server. One that takes no grammar may break the form, and its reply is then no critique."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self.writer = ServerWriter(url, model, key, ASKED_AT_ONCE)

    def replies(self, questions: Sequence[Question], temperature: float) -> list[Reply]:
        found: list[Reply] = [""] * len(questions)
        alike: dict[tuple[str, int, int], list[int]] = {}
        for number, question in enumerate(questions):
            alike.setdefault((question.grammar, question.max_tokens, question.seed), []).append(number)
        for (grammar, max_tokens, seed), numbers in alike.items():
            asked = [[{"role": "user", "content": questions[number].prompt}] for number in numbers]
            form = Form(grammar=grammar)
            texts = self.writer.write(asked, max_tokens=max_tokens, form=form, temperature=temperature, seed=seed)
            for number, text in zip(numbers, texts, strict=True):
                found[number] = after_thought(text)
        return found
