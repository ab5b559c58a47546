"""What rewards that let a model judge have in common: how it is asked."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.align.rewards import Reward
from moesaic.worlds.example import Example
from moesaic.worlds.judges.critiques import Asking, Form


@dataclass(frozen=True, kw_only=True)
class JudgingReward(Reward):
    form: Form = "pointwise"
    reference: bool = True  # whether the judge sees the reference, where there is one
    both_orders: bool = True  # ask a pair in both orders, and take the mean: judges favour a place
    thoughts: bool = False  # whether the judge sees them
    brief: bool = False  # leave out how to judge, for a judge that was trained so

    def lacks(self, example: Example) -> str:
        if self.form == "pairwise" and "other" not in example.facts:
            return "another answer to compare with (other)"
        constraints = example.facts.get("constraints") or ()
        if self.form == "checklist" and not any("text" in one for one in constraints if isinstance(one, dict)):
            return "constraints in words"
        return ""

    @property
    def asking(self) -> Asking:
        return Asking(self.form, self.reference, self.both_orders, self.thoughts, self.brief)
