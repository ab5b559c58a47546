"""A trained critic as a reward (CritiqueLLM, IF-CRITIC, ChatGLM-Math): a model directory that judges in this process,
all completions of a batch at once.

rewards: [{name: critic, model: "stage:1", brief: true}]                   # what a `critiques` stage has trained
rewards: [{name: critic, model: out/critic, form: checklist, tokens: 64}]

It may be any model with a chat template. A grammar holds it to the form, so that also a small one gives a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moesaic.align.critiques.judges import EngineJudge, Question, Reply
from moesaic.align.rewards._judging import JudgingReward
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.serve.core.request import Sampling
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class CriticReward(JudgingReward):
    """What it gives depends on the form, as that of `critique` does."""

    held_out: ClassVar[bool] = True  # beside the accuracy: a score that rises alone is a critic that is fooled

    model: str
    tokens: int = 128  # of a critique before each verdict, at most; 0: the verdict alone
    temperature: float = 0.0
    seed: int = 0
    _judge: EngineJudge = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError("tokens cannot be negative")
        Sampling(temperature=self.temperature, seed=self.seed)
        match(open_checkpoint(self.model))
        object.__setattr__(self, "_judge", EngineJudge(self.model))

    def each(self, answers: Sequence[Answer]) -> list[float | Exception]:
        asked: list[list[Question] | Exception] = []
        for answer in answers:
            try:
                asked.append(self.questions(answer))
            except Exception as error:  # costs this answer its reward, and no other
                asked.append(error)
        questions = [question for one in asked if not isinstance(one, Exception) for question in one]
        replies = iter(self._judge.replies(questions, self.temperature))
        given = [one if isinstance(one, Exception) else [next(replies) for _ in one] for one in asked]
        return [self._score(answer, found) for answer, found in zip(answers, given, strict=True)]

    def questions(self, answer: Answer) -> list[Question]:
        asking = self.asking
        grammar, length = asking.grammar(answer, self.tokens), asking.length(answer, self.tokens)
        return [Question(prompt, grammar, length, self.seed) for prompt in asking.prompts(answer)]

    def _score(self, answer: Answer, replies: list[Reply] | Exception) -> float | Exception:
        if isinstance(replies, Exception):
            return replies
        said = [reply for reply in replies if isinstance(reply, str)]
        if len(said) < len(replies):
            return next(reply for reply in replies if isinstance(reply, Exception))
        try:
            return self.asking.score(answer, said)
        except ValueError as error:
            return error
