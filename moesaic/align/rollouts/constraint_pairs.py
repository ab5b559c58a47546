"""Constraint-level preference (IF-CRITIC's kind of pair): two answers to one instruction, of which the first keeps a
constraint that the second breaks, and everything else that the second keeps.

So what a pair says is what that one constraint is worth, and an instruction of which no answer keeps everything gives
pairs as well. The best against the worst of an instruction differ in many things at once. Whoever keeps most is taken
first: DPO with a term of likelihood learns the better answer itself, with what it breaks.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.align.rollouts.rollout import Sample
from moesaic.worlds.example import Example
from moesaic.worlds.judges.constraints import verdicts

Kept = tuple[bool, ...]  # each constraint, in the order of the instruction


def constraint_pairs(example: Example, samples: Sequence[Sample]) -> list[tuple[str, Sample, Sample]]:
    """For each constraint its kind, who keeps it and who breaks it: of the first the best, of the others the one that
    differs least from it."""
    judged = [(sample, *_verdicts(example, sample)) for sample in samples if _can_be_judged(sample)]
    pairs = []
    for number in range(max((len(kept) for _, _, kept in judged), default=0)):
        found = [
            (-sum(better), -sum(worse), a, b)
            for a, (one, _, better) in enumerate(judged)
            for b, (_, _, worse) in enumerate(judged)
            if better[number] > worse[number] and _keeps_all_of(better, worse) and one.finish_reason == "stop"
        ]
        if found:
            *_, a, b = min(found)
            pairs.append((judged[a][1][number], judged[a][0], judged[b][0]))
    return pairs


def _can_be_judged(sample: Sample) -> bool:
    return bool(sample.text.strip()) and not sample.judged.problems


def _verdicts(example: Example, sample: Sample) -> tuple[list[str], Kept]:
    found = verdicts(sample.text, example.facts["constraints"])
    return [verdict.kind for verdict in found], tuple(verdict.kept for verdict in found)


def _keeps_all_of(better: Kept, worse: Kept) -> bool:
    return all(one >= other for one, other in zip(better, worse, strict=True))
