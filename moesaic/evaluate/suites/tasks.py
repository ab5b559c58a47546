"""Questions with verifiable answers that no training ever saw (reasoning-gym's families): the share answered rightly.

    moesaic evaluate out/aligned --suite tasks
    moesaic evaluate out/smollm2 --suite tasks family=gcd examples=200 max_tokens=64 --json

Answers are greedy and come from the engine, all of them side by side. The interval is Wilson's, at 95 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.data.tasks import INDICES, Task, check_family, score, tasks
from moesaic.data.tasks.families import PRESETS, split_names
from moesaic.errors import UserError
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.suites import Asked, Suite
from moesaic.model.transformer import Model
from moesaic.serve.engine import Engine
from moesaic.serve.request import Sampling

SHOWN = 4  # questions that are told with their answers


@dataclass(frozen=True)
class Tasks(Suite):
    family: str = "sums"  # a set of families, or families with their options, as in a source of data
    examples: int = 128
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= INDICES or self.max_tokens < 1:
            raise ValueError("examples and max_tokens must be at least 1")

    def run(self, model: Model, asked: Asked) -> dict[str, Any]:
        tokenizer = model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise UserError("model", "has no tokenizer with a chat template", "Questions are asked as in a chat.")
        questions = held_out(self.family, self.examples)
        engine = Engine(model, seed=0)
        wishes = Sampling(max_tokens=self.max_tokens, temperature=0.0)
        asked_in_chat = [tokenizer.chat([{"role": "user", "content": task.question.strip()}]) for task in questions]
        requests = [engine.request(tokenizer.encode(text, special=False), wishes) for text in asked_in_chat]
        said = {request.number: "" for request in requests}
        for request in requests:
            engine.add(request)
        while engine.working:
            for output in engine.step():
                said[output.request.number] += output.text
            asked.progress(engine.counts.finished, len(requests))
        answers = [said[request.number].strip() for request in requests]
        right = [score(task, answer) >= 1.0 for task, answer in zip(questions, answers, strict=True)]
        low, high = wilson(sum(right), len(right))
        return {
            "accuracy": sum(right) / len(right),
            "accuracy_low": low,
            "accuracy_high": high,
            "examples": len(right),
            "answer_tokens": sum(request.written for request in requests) / len(requests),
            "tokens_per_second": engine.counts.generated_tokens / max(engine.counts.busy_seconds, 1e-9),
            "samples": [
                {"question": task.question.strip(), "answer": answer, "right": ok, "expected": task.answer}
                for task, answer, ok in list(zip(questions, answers, right, strict=True))[:SHOWN]
            ],
        }


def held_out(family: str, count: int) -> list[Task]:
    families = PRESETS.get(family) or split_names(family)
    for name in families:
        check_family(name, "family")
    return [tasks(families[number % len(families)], "test", number // len(families)) for number in range(count)]
