"""Questions with verifiable answers that no training ever saw (reasoning-gym's families): the share answered rightly.

moesaic evaluate out/aligned --suite tasks
moesaic evaluate out/smollm2 --suite tasks family=gcd examples=200 max_tokens=64 --json
moesaic evaluate out/tiny --suite tasks plain=true

`plain`: asked as the text of pretraining has it, for a model that has seen no chat yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.data.tasks import INDICES, Task, check_family, opening, score, tasks
from moesaic.data.tasks.families import PRESETS, split_names
from moesaic.errors import UserError
from moesaic.evaluate.backends import Answer
from moesaic.evaluate.questions import Question, QuestionSuite
from moesaic.evaluate.suites import SuiteContext
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.worlds.judges.answer_part import after_thought


@dataclass(frozen=True)
class Tasks(QuestionSuite):
    family: str = "sums"  # a set of families, or families with their options, as in a source of data
    examples: int = 128
    max_tokens: int = 64
    plain: bool = False  # without a chat template

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= INDICES or self.max_tokens < 1:
            raise ValueError("examples and max_tokens must be at least 1")

    def questions(self, context: SuiteContext) -> list[Question]:
        return [
            Question(task.question.strip(), task.answer, {"task": task}, task.family.partition(":")[0])
            for task in held_out(self.family, self.examples)
        ]

    def answers(self, questions: Sequence[Question], model: Model | None, context: SuiteContext) -> list[Answer]:
        if not self.plain:
            return super().answers(questions, model, context)
        if model is None:
            raise UserError("plain", "a server is asked as in a chat", "Leave it out, or name a directory.")
        prompts = [opening(question.facts["task"]) for question in questions]
        completions = Engine(model, seed=0).generate(prompts, max_tokens=self.max_tokens, temperature=0.0)
        context.progress(len(prompts), len(prompts))
        return [Answer(one.text.partition("\nQuestion:")[0], len(one.tokens)) for one in completions]

    def judge(self, question: Question, text: str) -> float:
        return float(score(question.facts["task"], after_thought(text)) >= 1.0)


def held_out(family: str, count: int) -> list[Task]:
    families = PRESETS.get(family) or split_names(family)
    for name in families:
        check_family(name, "family", or_set=name == family)
    return [tasks(families[number % len(families)], "test", number // len(families)) for number in range(count)]
