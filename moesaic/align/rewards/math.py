"""Right if it is the same mathematics as the right answer (package math-verify): 1/2, 0.5 and \\frac{1}{2} are one."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.align.rewards import Reward, without_truth
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import Part, part_of, truths
from moesaic.worlds.judges.math_worker import MathWorker


@dataclass(frozen=True)
class MathEqual(Reward):
    """Compared in a process of its own, which is killed when it takes too long: 9^{9^{9^9}} is soon written."""

    seconds: float = 5.0
    part: Part = "after_thought"
    worker: MathWorker = field(default_factory=MathWorker, init=False, repr=False, compare=False)

    def __call__(self, answer: Answer) -> float:
        said = part_of(answer.text, self.part)
        right = truths(answer)
        if said in right:
            return 1.0
        return float(bool(said) and any(self.worker.equal(truth, said, self.seconds) for truth in right))

    def lacks(self, example: Example) -> str:
        return without_truth(example)
