"""CANOE's Dual-GRPO: faithful to the context it was given, rewarded by short answers that a rule can check.

The policy writes its thoughts, a long answer and a short one, each in its tag. Three rewards, added up with weights:
the short answer is right; what follows from the long answer alone is right (the proxy, which keeps a policy from
learning only to copy spans); the form is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.align.rewards import Reward
from moesaic.align.rewards._chat import Endpoint
from moesaic.align.rewards.exact import Exact
from moesaic.align.rewards.format import Format
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import part_of, truths

DERIVE = """Answer the question from the passage alone, in as few words as you can. Use nothing else that you know.

Passage: {passage}

Question: {question}

Answer:"""


@dataclass(frozen=True)
class Faithfulness(Reward):
    """Whoever makes the rollouts may derive the short answer from the long one itself, with the policy, and put it in
    `facts["derived"]`; else the model at `url` is asked, which may be the policy's own server."""

    parallel: ClassVar[int] = 16

    long_form: bool = True  # without it: the short answer and the form
    accuracy: float = 1.0
    proxy: float = 1.0
    form: float = 1.0
    tags: tuple[str, str, str] = ("think", "long_answer", "answer")
    url: str | None = None
    model: str = "default"
    key_variable: str | None = None
    seconds: float = 60.0
    retries: int = 2

    def __post_init__(self) -> None:
        if min(self.accuracy, self.proxy, self.form) < 0:
            raise ValueError("weights cannot be negative")
        self._endpoint()

    def __call__(self, answer: Answer) -> float:
        thought, long, short = self.tags
        right = Exact(articles=False)
        known = [right.normal(truth) for truth in truths(answer)]
        form = Format(self.tags if self.long_form else (thought, short))(answer)
        total = self.form * form
        total += self.accuracy * (right.normal(part_of(answer.text, "tag", short)) in known)
        if self.long_form:
            passage = part_of(answer.text, "tag", long)
            total += self.proxy * bool(passage and right.normal(self._derived(answer, passage)) in known)
        return total

    def _derived(self, answer: Answer, passage: str) -> str:
        if "derived" in answer.facts:
            return str(answer.facts["derived"])
        if (endpoint := self._endpoint()) is None:
            raise ValueError('nobody derives an answer from the long one: give a url, or facts["derived"]')
        question = str(answer.facts.get("bare_question", answer.question))  # without the context it came with
        return endpoint.ask(DERIVE.format(passage=passage, question=question), max_tokens=64, temperature=0.0)

    def _endpoint(self) -> Endpoint | None:
        if self.url is None:
            return None
        return Endpoint(self.url, self.model, self.key_variable, self.seconds, self.retries)
