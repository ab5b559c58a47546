"""A faithfulness detector as a reward (FaithLens): 1 where a trained model finds an answer faithful to its passage.

rewards: [{name: faithfulness}, {name: detector, model: out/detector}]

The model's directory is one that learned from `builtin:claims`. It explains before it judges, in this process, all
completions of a batch at once; what it reads is the passage and the part of the answer between the `tag`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moesaic.align.critiques.judges import EngineJudge, Question
from moesaic.align.rewards import Reward
from moesaic.data.tasks.claims import NO, YES, label_of, prompt
from moesaic.data.tasks.context_qa import SILENT, TAGS, statements_of
from moesaic.data.tasks.statements import told
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import part_of


def grammar(tokens: int) -> str:
    """An explanation of so many tokens at most, and a label."""
    end = f'"</explanation>\\n<label>" ("{YES}" | "{NO}") "</label>"'
    return f'start: "<explanation>" text {end}\ntext[max_tokens={tokens}]: /[^<]*/'


@dataclass(frozen=True)
class Detector(Reward):
    held_out: ClassVar[bool] = True

    model: str
    tag: str = TAGS[1]
    tokens: int = 64  # of an explanation, at most
    instructions: bool = True  # whether it was trained with them
    _judge: EngineJudge = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens are at least 1")
        match(open_checkpoint(self.model))
        object.__setattr__(self, "_judge", EngineJudge(self.model))

    def each(self, answers: Sequence[Answer]) -> list[float | Exception]:
        found: list[float | Exception] = [0.0 for _ in answers]
        asked: list[tuple[int, Question]] = []
        for number, answer in enumerate(answers):
            passage, said = passage_of(answer), part_of(answer.text, "tag", self.tag)
            if passage is None:
                found[number] = ValueError("the question came without a passage")
            elif said == SILENT:  # which claims nothing: whether it is right, other rewards say
                found[number] = 1.0
            elif said:
                text = prompt(passage, said, False, self.instructions)
                asked.append((number, Question(text, grammar(self.tokens), self.tokens + 32)))
        replies = self._judge.replies([question for _, question in asked], 0.0)
        for (number, _), reply in zip(asked, replies, strict=True):
            found[number] = reply if isinstance(reply, Exception) else float(label_of(reply) == YES)
        return found

    def lacks(self, example: Example) -> str:
        return "a passage" if passage_of(example) is None else ""


def passage_of(asked: Answer | Example) -> str | None:
    """Of a task of `builtin:context_qa`, or of a line."""
    if asked.task is not None and "passage" in asked.task.metadata:
        return told(statements_of(asked.task.metadata, "passage"))
    passage = asked.facts.get("passage")
    return passage if isinstance(passage, str) else None
