"""Whether a long answer says nothing but what its passage states: what CANOE's proxy stands for, checked by code.

rewards: [{name: faithfulness}, {name: supported, weight: 0}]     # only measured, also on held-out passages

Every sentence of the long answer must stand in the passage, and those be there that the short answer rests on. Only
passages of `builtin:context_qa` can be read like that, so it is what other rewards are measured by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.align.rewards import Reward
from moesaic.data.tasks.context_qa import TAGS, statements_of, unsupported
from moesaic.data.tasks.statements import sentences
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import part_of


@dataclass(frozen=True)
class Supported(Reward):
    held_out: ClassVar[bool] = True

    complete: bool = True  # whether what the answer rests on must be there

    def __call__(self, answer: Answer) -> float:
        if answer.task is None or "passage" not in answer.task.metadata:
            raise ValueError("the question did not come from builtin:context_qa")
        said = part_of(answer.text, "tag", TAGS[1])
        if not said or unsupported(said, answer.task.metadata):
            return 0.0
        needed = {one.told() for one in statements_of(answer.task.metadata, "needed")}
        return float(not self.complete or needed <= set(sentences(said)))

    def lacks(self, example: Example) -> str:
        known = example.task.metadata if example.task is not None else {}
        return "" if "passage" in known else "a passage of builtin:context_qa"
