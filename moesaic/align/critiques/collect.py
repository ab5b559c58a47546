"""Data that a critic is trained on: answers of a model, judged by teachers, with what the filters leave of it.

Files in the run's `critiques` folder, written once, each whole or not at all:

    critiques.jsonl   every critique that holds: its kind, its side, what code knows
    kept.jsonl        questions to the critic with critiques that hold, as an SFT stage reads them
    pairs.jsonl       with one that holds and one that does not, as a preference stage reads them
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.align.critiques.filters import Settled
from moesaic.align.critiques.items import Item, Tribunal
from moesaic.align.critiques.judges import Question
from moesaic.align.critiques.paths import Found, Judged, checklists, single_answers
from moesaic.align.critiques.planted import planted
from moesaic.align.examples import Mixture
from moesaic.align.rewards import Reward, judge
from moesaic.align.rollouts.rejection import AT_ONCE, write_lines
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import requests_for, seed_of
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.critiques import Asking, constraints_of, listed, listing, listing_grammar

LISTED_TOKENS = 256  # of a checklist


@dataclass(frozen=True)
class Plan:
    """What is asked about which answers."""

    forms: tuple[str, ...]
    asking: Asking
    truth: Sequence[tuple[str, float, Reward]]  # rewards that know by code how good an answer is
    prompts: int
    group: int  # answers to each, unless the line brings `responses`
    sampling: Mapping[str, Any]  # of answers
    keep: int  # critiques of one thing, at most
    balance: bool
    planted: float  # share of the answers that end with a verdict on themselves
    seed: int


Line = dict[str, Any]
Kept = dict[str, list[tuple[Item, Settled]]]  # by kind


def collect(
    engine: Engine, examples: Mixture, plan: Plan, tribunal: Tribunal, folder: Path, key: str
) -> dict[str, float]:
    """Makes the files, unless those of the same `key` are there. Returns what came of it."""
    done = folder / "summary.json"
    if done.is_file() and (summary := read_json(done)).get("key") == key:
        return dict(summary["notes"])
    order = examples.at([0] * len(examples.sources))
    kept: Kept = defaultdict(list)
    lists: list[Line] = []
    for start in range(0, plan.prompts, AT_ONCE):
        batch = [next(order) for _ in range(min(AT_ONCE, plan.prompts - start))]
        groups = answers(engine, batch, plan, start)
        if "checklist" in plan.forms:
            groups, told = with_checklists(groups, plan, tribunal)
            lists += told
        for kind, item, found in judged(groups, plan, tribunal):
            kept[kind].append((item, found))
    if plan.balance:
        kept = {kind: balanced(found, plan.seed) for kind, found in kept.items()}
    kept = {kind: planted(found, plan.planted, plan.seed) for kind, found in kept.items()}
    lines, pairs = sft_lines(kept, plan.keep), preference_lines(kept)
    if not lines:
        problem = f"no critique is left of {tribunal.asked} things that were judged ({dict(tribunal.outcomes)})"
        remedy = "Raise samples or prompts, lower agree, or name another teacher."
        raise UserError("align.stages: critiques", problem, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "critiques.jsonl", [_whole(kind, *one) for kind, found in kept.items() for one in found])
    write_lines(folder / "kept.jsonl", lines + lists)
    write_lines(folder / "pairs.jsonl", pairs)
    notes = {f"kept/{kind}": float(len(found)) for kind, found in kept.items()}
    notes |= {f"dropped/{why}": float(count) for why, count in tribunal.outcomes.items()}
    notes |= {"judged": float(tribunal.asked), "critiques_kept": float(len(lines)), "pairs_made": float(len(pairs))}
    if tribunal.checked:
        notes["teacher_right"] = tribunal.right / tribunal.checked
    atomic.write_json(done, {"key": key, "notes": notes}, indent=1)
    return notes


def judged(groups: Sequence[Sequence[Judged]], plan: Plan, tribunal: Tribunal) -> Found:
    if "pointwise" in plan.forms or "pairwise" in plan.forms:
        wanted = {"pointwise": ("pointwise", "referenced"), "pairwise": ("pairwise", "pairwise_referenced")}
        kinds = {kind for form in plan.forms for kind in wanted.get(form, ())}
        for found in single_answers(groups, tribunal, plan.asking, "pairwise" in plan.forms):
            if found[0] in kinds:
                yield found
    if "checklist" in plan.forms:
        yield from checklists([one for group in groups for one in group], tribunal, plan.asking)


def answers(engine: Engine, batch: Sequence[Example], plan: Plan, start: int) -> list[list[Judged]]:
    """Different answers to each question: those that its line brings, or some that the engine samples."""
    requests = []
    for number, example in enumerate(batch):
        if "responses" not in example.facts:
            seed = seed_of(plan.seed, start + number)
            requests += requests_for(engine, example, plan.group, plan.sampling, seed)
    done = iter(engine.complete(requests))
    groups: list[list[Answer]] = []
    for example in batch:
        texts = example.facts.get("responses") or [next(done).text for _ in range(plan.group)]
        facts = {key: value for key, value in example.facts.items() if key != "responses"}
        said = dict.fromkeys(str(text).strip() for text in texts)
        plain = Answer(example.question, "", 0, "stop", example.truth, example.task, facts, example.messages)
        groups.append([replace(plain, text=text) for text in said if text])
    scored = iter(judge(plan.truth, [answer for group in groups for answer in group]))
    return [[_with_truth(answer, next(scored), bool(plan.truth)) for answer in group] for group in groups]


def _with_truth(answer: Answer, found: Any, known: bool) -> Judged:
    return Judged(answer, found.total if known and not found.problems else None)


def with_checklists(
    groups: Sequence[Sequence[Judged]], plan: Plan, tribunal: Tribunal
) -> tuple[list[list[Judged]], list[Line]]:
    """Answers to instructions whose constraints are in words: as their lines say, and then a checklist is something to
    learn to write; or as the teacher lists them."""
    given = [next((one.answer for one in group if one.answer.facts.get("constraints")), None) for group in groups]
    bare = [n for n, group in enumerate(groups) if group and given[n] is None]
    brief, grammar = plan.asking.brief, listing_grammar()
    questions = [
        Question(listing(groups[n][0].answer.question, brief), grammar, LISTED_TOKENS, seed_of(plan.seed, n))
        for n in bare
    ]
    written = dict(zip(bare, tribunal.judges[0].replies(questions, 0.0), strict=True))
    found: list[list[Judged]] = []
    for number, group in enumerate(groups):
        reply = written.get(number)
        if isinstance(reply, str):
            constraints = [{"text": text} for text in listed(reply)]
            group = [replace(one, answer=_about(one.answer, constraints)) for one in group]
        elif reply is not None:
            tribunal.drop("unlisted")
        found.append(list(group))
    told = [
        _turns(
            listing(answer.question, brief),
            "\n".join(f"{n}. {text}" for n, (text, _) in enumerate(constraints_of(answer), start=1)),
        )
        for answer in given
        if answer is not None and any("text" in constraint for constraint in answer.facts["constraints"])
    ]
    return found, told


def balanced(found: Sequence[tuple[Item, Settled]], seed: int) -> list[tuple[Item, Settled]]:
    """As many on one side as on the other: a critic that mostly saw good answers finds all of them good."""
    sides = {side: [n for n, (_, one) in enumerate(found) if one.side == side] for side in (1, -1)}
    least = min(map(len, sides.values()))
    draw = random.Random(seed)
    chosen = {number for numbers in sides.values() for number in draw.sample(numbers, least)}
    return [one for number, one in enumerate(found) if number in chosen]


def sft_lines(kept: Kept, keep: int) -> list[Line]:
    lines = []
    for kind, found in kept.items():
        if kind == "checklist":
            lines += [_turns(item.prompt, texts[0]) for item, texts in _whole_lists(found)]
        else:
            lines += [_turns(item.prompt, text) for item, one in found for text in one.kept[:keep]]
    return lines


def preference_lines(kept: Kept) -> list[Line]:
    """Of a checklist a pair for each constraint: two critiques that differ in that constraint and in nothing else."""
    lines = []
    for kind, found in kept.items():
        if kind == "checklist":
            for item, (chosen, *rejected) in _whole_lists(found):
                lines += [{"prompt": item.prompt, "chosen": chosen, "rejected": text} for text in rejected]
        else:
            lines += [
                {"prompt": item.prompt, "chosen": one.kept[0], "rejected": one.rejected[0]}
                for item, one in found
                if one.rejected
            ]
    return lines


def _whole_lists(found: Sequence[tuple[Item, Settled]]) -> list[tuple[Item, list[str]]]:
    """The constraints of one answer put together again: a critique of all of them, and for each constraint with a
    critique that does not hold the same with that one in its place."""
    by_answer: dict[tuple[str, str], list[tuple[Item, Settled]]] = defaultdict(list)
    for item, one in found:
        by_answer[item.answer.question, item.answer.text].append((item, one))
    whole = []
    for parts in by_answer.values():
        constraints = [item.answer.facts["constraints"][0] for item, _ in parts]
        item = replace(parts[0][0], answer=_about(parts[0][0].answer, constraints))
        texts = [_joined([one.kept[0] for _, one in parts])]
        for place, (_, one) in enumerate(parts):
            if one.rejected:
                texts.append(_joined([one.rejected[0] if n == place else o.kept[0] for n, (_, o) in enumerate(parts)]))
        whole.append((item, texts))
    return whole


def _joined(critiques: Sequence[str]) -> str:
    """Each was the first of its own list."""
    return "\n".join(
        f"Constraint {number}:".join(text.rsplit("Constraint 1:", 1)) for number, text in enumerate(critiques, start=1)
    )


def _about(answer: Answer, constraints: list[dict[str, Any]]) -> Answer:
    return replace(answer, facts={**answer.facts, "constraints": constraints})


def _turns(asked: str, said: str) -> Line:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def _whole(kind: str, item: Item, found: Settled) -> Line:
    texts = {"prompt": item.prompt, "critiques": list(found.kept), "rejected": list(found.rejected)}
    return {"kind": kind, "side": found.side, "by_code": item.truth, **texts}
