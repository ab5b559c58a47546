"""CritiqueLLM and IF-CRITIC: another model judges, behind any OpenAI-compatible URL, and explains before it rates.

rewards: [{name: critique, url: "http://localhost:8000/v1", model: judge, key_variable: JUDGE_KEY}]

A judge whose directory is at hand is the reward `critic`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.align.rewards._chat import Endpoint
from moesaic.align.rewards._judging import JudgingReward
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import after_thought


@dataclass(frozen=True)
class Critique(JudgingReward):
    """What it gives depends on the form.

    `pointwise`: a rating, as 0 to 1. `pairwise`: 1 if better than `facts["other"]`, a half if equal. `checklist`: the
    weighted share of `facts["constraints"]` (those with a `text`) that are kept. The reference is `facts["reference"]`,
    or else the right answer.
    """

    parallel: ClassVar[int] = 16

    url: str
    model: str
    key_variable: str | None = None
    seconds: float = 60.0
    retries: int = 2
    max_tokens: int = 1024
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self._endpoint()

    def __call__(self, answer: Answer) -> float:
        return self.asking.score(answer, [self._ask(prompt) for prompt in self.asking.prompts(answer)])

    def _ask(self, prompt: str) -> str:
        return after_thought(self._endpoint().ask(prompt, self.max_tokens, self.temperature))

    def _endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.model, self.key_variable, self.seconds, self.retries)
