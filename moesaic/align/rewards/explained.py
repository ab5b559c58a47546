"""FaithLens' reward of an explanation: whether a reader who has nothing but the explanation finds the right label.

rewards: [{name: task}, {name: explained}]                  # the policy itself reads, without the text
rewards: [{name: task}, {name: explained, reader: DIR}]     # a weaker model does, in this process

Answers are those to `builtin:claims`, or to lines with a `claim` and an `answer`: an explanation and a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moesaic.align.critiques.judges import EngineJudge, Question
from moesaic.align.rewards import Reward
from moesaic.data.tasks.claims import NO, TAGS, YES, prompt
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import part_of, truths

LABEL, TOKENS = f'start: "{YES}" | "{NO}"', 8


@dataclass(frozen=True)
class Explained(Reward):
    reader: str | None = None  # a model's directory; none: the policy
    _judge: EngineJudge | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.reader is not None:
            match(open_checkpoint(self.reader))
            object.__setattr__(self, "_judge", EngineJudge(self.reader))

    def each(self, answers: Sequence[Answer]) -> list[float | Exception]:
        replies = self._read(self._judge, answers) if self._judge is not None else {}
        return [self._of(answer, replies) for answer in answers]

    def asks(self, answer: Answer) -> Mapping[str, int]:
        question = self._question(answer)
        return {question: TOKENS} if self.reader is None and question else {}

    def lacks(self, example: Example) -> str:
        known = example.task.metadata if example.task is not None else example.facts
        return "" if "claim" in known and known.get("tags", TAGS) else "a claim to explain"

    def _of(self, answer: Answer, replies: Mapping[str, str | Exception]) -> float | Exception:
        try:
            right = truths(answer)
        except ValueError as error:
            return error
        question = self._question(answer)
        if not question:
            return 0.0
        said = (replies if self.reader is not None else answer.replies).get(question, ValueError("nobody read it"))
        return said if isinstance(said, Exception) else float(said.strip() in right)

    def _question(self, answer: Answer) -> str:
        """Nothing where there is no explanation, or no claim."""
        known = answer.task.metadata if answer.task is not None else answer.facts
        said = part_of(answer.text, "tag", TAGS[0])
        return (
            prompt(said, str(known["claim"]), True, known.get("instructions", True))
            if said and "claim" in known
            else ""
        )

    def _read(self, judge: EngineJudge, answers: Sequence[Answer]) -> dict[str, str | Exception]:
        asked = list(dict.fromkeys(filter(None, map(self._question, answers))))
        said = judge.replies([Question(one, LABEL, TOKENS) for one in asked], 0.0)
        return dict(zip(asked, said, strict=True))
