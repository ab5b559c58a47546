"""The share of an instruction's constraints that the answer keeps (IF-CRITIC's checklist, where a rule can check it).

The constraints come with the question, `facts["constraints"]`, as `{kind: max_words, value: 50, weight: 2}`. What only
a reader can judge (`text`, without a kind) is for the reward `critique` in its form `checklist`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.align.rewards import Reward
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.constraints import share_kept


@dataclass(frozen=True)
class Constraints(Reward):
    all_or_nothing: bool = False  # 1 only if every constraint is kept; else the weighted share that is

    def __call__(self, answer: Answer) -> float:
        return share_kept(answer.text, answer.facts.get("constraints"), self.all_or_nothing)

    def lacks(self, example: Example) -> str:
        return "" if example.facts.get("constraints") else "constraints"
