"""CANOE's Dual-GRPO: faithful to the context it was given, rewarded by short answers that a rule can check.

rewards: [{name: faithfulness}]

The policy writes its thoughts, a long answer and a short one, each in its tag. Three rewards, added up with weights:
the short answer is right; what follows from the long answer alone is right (the proxy, which keeps a policy from
learning only to copy spans); the form is kept. What follows, the policy itself says: it is asked the question once
more, with its long answer in place of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.align.rewards import Reward, without_truth
from moesaic.align.rewards.exact import Exact
from moesaic.align.rewards.format import Format
from moesaic.data.tasks.context_qa import TAGS, prompt
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import part_of, truths

RIGHT = Exact(articles=False)


@dataclass(frozen=True)
class Faithfulness(Reward):
    """Prompts come from `builtin:context_qa`, or are lines with the right answer and the question without its text
    (`bare_question`)."""

    held_out: ClassVar[bool] = True

    long_form: bool = True  # without it: the short answer and the form
    accuracy: float = 1.0
    proxy: float = 1.0
    form: float = 1.0
    tags: tuple[str, ...] = TAGS  # the last is of the short answer, the one before it of the long one
    tokens: int = 32  # of a proxy answer, at most

    def __post_init__(self) -> None:
        if min(self.accuracy, self.proxy, self.form) < 0 or self.tokens < 1:
            raise ValueError("weights cannot be negative, and tokens are at least 1")
        if len(self.tags) < 2 or len(set(self.tags)) < len(self.tags):
            raise ValueError("tags are at least two, those of the long and of the short answer, and all different")

    def __call__(self, answer: Answer) -> float:
        *thoughts, long, short = self.tags
        known = [RIGHT.normal(truth) for truth in truths(answer)]
        form = Format((*thoughts, long, short) if self.long_form else (*thoughts, short))(answer)
        total = self.form * form
        total += self.accuracy * (RIGHT.normal(part_of(answer.text, "tag", short)) in known)
        if self.long_form:
            total += self.proxy * (self.derived(answer) in known)
        return total

    def derived(self, answer: Answer) -> str | None:
        """What the policy takes from its long answer; nothing if it wrote none."""
        for question in self.asks(answer):
            if question not in answer.replies:
                raise ValueError("the policy was not asked what follows from its long answer")
            said = answer.replies[question]
            return RIGHT.normal(part_of(said, "tag", self.tags[-1]) or said)
        return None

    def asks(self, answer: Answer) -> Mapping[str, int]:
        passage = part_of(answer.text, "tag", self.tags[-2])
        known = answer.task.metadata if answer.task is not None else answer.facts
        if not self.long_form or not passage or "bare_question" not in known:
            return {}
        return {prompt(passage, str(known["bare_question"]), (), known.get("instructions", True)): self.tokens}

    def lacks(self, example: Example) -> str:
        known: Mapping[str, Any] = example.task.metadata if example.task is not None else example.facts
        if lacking := without_truth(example):
            return lacking
        if self.long_form and not isinstance(known.get("bare_question"), str):
            return "a bare_question, that is, the question without the text that answers it"
        asked = tuple(known.get("tags", self.tags))
        if self.long_form and asked != self.tags:
            return f"the tags {', '.join(self.tags)}; it has {', '.join(asked) or 'none'}"
        return ""
