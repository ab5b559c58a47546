"""Pairs of a kept and a broken constraint: by hand, and of a model's own samples in a stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.align.align import align
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.constraint_pairs import constraint_pairs
from moesaic.align.rollouts.rollout import Sample
from moesaic.worlds.example import Example
from moesaic.worlds.judges.constraints import verdicts
from tests.align.made import ADAMW, assert_refused, recipe_of
from tests.align.test_own_samples import lines
from tests.serve.made import talking_model

CONSTRAINTS = [{"kind": "lowercase"}, {"kind": "ends_with", "value": "."}, {"kind": "max_words", "value": 2}]
ASKED = Example(({"role": "user", "content": "Say it."},), facts={"constraints": CONSTRAINTS})


def said(text: str, finish_reason: str = "stop", problems: tuple[str, ...] = ()) -> Sample:
    return Sample([], [], [], [], text, finish_reason, Judged(0.0, {}, problems))


def pairs(*samples: Sample) -> list[tuple[str, str, str]]:
    return [(kind, better.text, worse.text) for kind, better, worse in constraint_pairs(ASKED, samples)]


def test_of_each_constraint_the_best_and_who_differs_least_from_it() -> None:
    found = pairs(said("A b c d"), said("a b c d"), said("a b c d."), said("A b."))
    assert found == [
        ("lowercase", "a b c d.", "A b c d"),  # "A b." keeps what it breaks
        ("ends_with", "a b c d.", "a b c d"),
        ("max_words", "A b.", "A b c d"),
    ]


def test_what_keeps_one_constraint_and_breaks_another_is_no_better() -> None:
    assert pairs(said("a b c"), said("A b")) == []


def test_a_pair_differs_in_nothing_else_where_it_can() -> None:
    assert pairs(said("a b c"), said("A b c"), said("a b."), said("A b."))[0] == ("lowercase", "a b.", "A b.")


def test_who_was_cut_off_is_not_better_and_who_was_not_judged_stands_in_no_pair() -> None:
    assert pairs(said("a.", finish_reason="length"), said("A.")) == []
    assert pairs(said("a."), said("A.", finish_reason="length")) == [("lowercase", "a.", "A.")]
    assert pairs(said("a."), said("A.", problems=("constraints: none",))) == []
    assert pairs(said("a."), said(" ")) == []


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that keeps either constraint by chance and never both, and instructions."""
    path = tmp_path_factory.mktemp("careless")
    shown = [{"question": f"Say {n}", "answer": text} for n in range(8) for text in ("yes", "Yes.", "YES")]
    instructions = [{"question": f"Say {n}", "constraints": CONSTRAINTS[:2]} for n in range(8)]
    for name, found in {"shown": shown, "instructions": instructions}.items():
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    data = f'data: [{{path: "{path / "shown.jsonl"}"}}]'
    sft = f"{{name: sft, steps: 60, lr: 0.005, {data}, batch_tokens: 400, evaluate_every: 0}}"
    align(recipe_of(path, sft, more=ADAMW), talking_model(path / "fresh"), path / "out", quiet=True)
    return path / "out", path / "instructions.jsonl"


def stage(instructions: Path, samples: str) -> str:
    return (
        f'{{name: preference, steps: 6, lr: 0.002, data: [{{path: "{instructions}"}}], batch_pairs: 4, '
        f"evaluate_every: 0, samples: {{prompts: 8, group: 8, max_tokens: 8, {samples}}}}}"
    )


BY_CONSTRAINT = "rewards: [{name: constraints}], by: constraint"


def test_a_stage_learns_from_pairs_that_differ_in_what_they_say(careless, tmp_path: Path) -> None:
    """Also where no answer keeps everything, of which the best against the worst makes no pair."""
    model, instructions = careless
    align(recipe_of(tmp_path, stage(instructions, BY_CONSTRAINT), more=ADAMW), model, tmp_path / "out", quiet=True)
    made = lines(tmp_path / "out/samples/pairs.jsonl")
    assert {pair["constraint"] for pair in made} == {"lowercase", "ends_with"}
    for pair in made:
        better, worse = (
            {verdict.kind: verdict.kept for verdict in verdicts(pair[side], CONSTRAINTS[:2])}
            for side in ("chosen", "rejected")
        )
        assert better[pair["constraint"]] and not worse[pair["constraint"]]
        assert all(better[kind] >= worse[kind] for kind in better)
    steps = lines(tmp_path / "out/metrics.jsonl")
    assert steps[0]["pairs_made"] == len(made) and steps[-1]["pairs_right"] > 0.5


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ("rewards: [{name: length, max_length: 4}], by: constraint", "wants the one reward constraints"),
        (f"{BY_CONSTRAINT}, margin: 0.5", "margin is of scores"),
        ("rewards: [{name: constraints}], by: chance", "by"),
    ],
)
def test_what_makes_no_such_pairs_is_refused(careless, tmp_path: Path, samples: str, message: str) -> None:
    model, instructions = careless
    assert_refused(tmp_path, model, stage(instructions, samples), message)
