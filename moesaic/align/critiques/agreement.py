"""How often a critic says what code knows, on answers that nothing was trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.align.critiques.collect import Plan, answers
from moesaic.align.critiques.items import Item, of_pair
from moesaic.align.critiques.judges import EngineJudge, Judge
from moesaic.align.critiques.paths import Judged, by_constraint, has_reference
from moesaic.align.examples import Mixture
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine

Verdicts = list[tuple[int | None, int]]  # the side that was said (None: no verdict), and the right one


@dataclass(frozen=True)
class Agreement:
    """Greedy verdicts beside the truth, by kind of critique. Accuracies are balanced, the mean of both sides: whoever
    always says the same has a half."""

    items: dict[str, list[Item]]
    tokens: int

    @classmethod
    def of(cls, engine: Engine, examples: Mixture, plan: Plan, tokens: int) -> Agreement | None:
        """On as many prompts as the plan has, if code knows anything of the answers to them."""
        order = examples.at([0] * len(examples.sources))
        groups = answers(engine, [next(order) for _ in range(plan.prompts)], plan, 0)
        items = known(groups, plan)
        return cls(items, tokens) if items else None

    def __call__(self, model: Model) -> dict[str, float]:
        found = {kind: balanced_accuracy(own) for kind, own in self.verdicts(judge_of(model)).items()}
        return {"accuracy": sum(found.values()) / len(found)} | {f"held_out/{kind}": one for kind, one in found.items()}

    def verdicts(self, judge: Judge) -> dict[str, Verdicts]:
        found: dict[str, Verdicts] = {}
        for kind, items in self.items.items():
            said = judge.replies([item.question(self.tokens, 0) for item in items], 0.0)
            sides = [item.side(one) if isinstance(one, str) else None for item, one in zip(items, said, strict=True)]
            found[kind] = [(side, item.truth or 0) for side, item in zip(sides, items, strict=True)]
        return found


def judge_of(model: Model) -> EngineJudge:
    return EngineJudge(Engine(model, max_requests=128, seed=0))


def balanced_accuracy(verdicts: Verdicts) -> float:
    rates = []
    for wanted in (1, -1):
        own = [said == wanted for said, truth in verdicts if truth == wanted]
        rates += [sum(own) / len(own)] if own else []
    return sum(rates) / len(rates)


def known(groups: Sequence[Sequence[Judged]], plan: Plan) -> dict[str, list[Item]]:
    """What code has an opinion of, by kind."""
    found: dict[str, list[Item]] = defaultdict(list)
    free = replace(plan.asking, reference=False)
    for group in groups:
        sure = [one for one in group if one.side]
        if "pointwise" in plan.forms:
            for one in sure:
                item = Item(plan.asking, one.answer, one.side)
                found["pointwise"].append(Item(free, one.answer, one.side))
                if has_reference(item):
                    found["referenced"].append(item)
        better, worse = ([one.answer for one in sure if one.side == side] for side in (1, -1))
        if "pairwise" in plan.forms and better and worse:
            truth = -1 if len(found["pairwise"]) % 2 else 1
            shown = of_pair(*((better[0], worse[0]) if truth == 1 else (worse[0], better[0])))
            for kind, asking in (("pairwise", free), ("pairwise_referenced", plan.asking)):
                item = Item(replace(asking, form="pairwise", both_orders=False), shown, truth)
                if kind == "pairwise" or has_reference(item):
                    found[kind].append(item)
        if "checklist" in plan.forms:
            every = (item for one in group for item in by_constraint(one.answer, plan.asking))
            found["checklist"] += [item for item in every if item.truth is not None]
    return {kind: items for kind, items in found.items() if items}
