"""Questions with verifiable answers that no training ever saw (reasoning-gym's families): the share answered rightly.

moesaic evaluate out/aligned --suite tasks
moesaic evaluate out/smollm2 --suite tasks family=gcd examples=200 max_tokens=64 --json
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.data.tasks import INDICES, Task, check_family, score, tasks
from moesaic.data.tasks.families import PRESETS, split_names
from moesaic.evaluate.questions import Question, QuestionSuite
from moesaic.evaluate.suites import SuiteContext
from moesaic.worlds.judges.answer_part import after_thought


@dataclass(frozen=True)
class Tasks(QuestionSuite):
    family: str = "sums"  # a set of families, or families with their options, as in a source of data
    examples: int = 128
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= INDICES or self.max_tokens < 1:
            raise ValueError("examples and max_tokens must be at least 1")

    def questions(self, context: SuiteContext) -> list[Question]:
        return [
            Question(task.question.strip(), task.answer, {"task": task}, task.family.partition(":")[0])
            for task in held_out(self.family, self.examples)
        ]

    def judge(self, question: Question, text: str) -> float:
        return float(score(question.facts["task"], after_thought(text)) >= 1.0)


def held_out(family: str, count: int) -> list[Task]:
    families = PRESETS.get(family) or split_names(family)
    for name in families:
        check_family(name, "family", or_set=name == family)
    return [tasks(families[number % len(families)], "test", number // len(families)) for number in range(count)]
