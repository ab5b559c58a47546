"""Pairs of the model's own completions: sampled once from the model that a stage starts from, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.align.align import align
from moesaic.align.rollouts import rejection
from moesaic.errors import UserError
from moesaic.recipe import Recipe
from tests.align.made import ADAMW, assert_refused, recipe_of
from tests.serve.made import talking_model

# Short answers are good ones.
SAMPLES = (
    "samples: {prompts: 6, group: 6, max_tokens: 8, right: 0.5, "
    "rewards: [{name: length, max_length: 0, slack: 24, unit: characters}]}"
)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that ends its answers, of which a fresh one ends hardly any; and questions."""
    path = tmp_path_factory.mktemp("ending")
    said = ("yes", "It is", "that as you like")
    talk = [{"question": f"Say {n}", "answer": text} for n in range(12) for text in said]
    (path / "talk.jsonl").write_text("\n".join(map(json.dumps, talk)))
    (path / "asked.jsonl").write_text("\n".join(json.dumps({"question": f"Say {n}"}) for n in range(12)))
    data = f'data: [{{path: "{path / "talk.jsonl"}"}}]'
    sft = f"{{name: sft, steps: 40, lr: 0.005, {data}, batch_tokens: 400, evaluate_every: 0}}"
    align(recipe_of(path, sft, more=ADAMW), talking_model(path / "fresh"), path / "out", quiet=True)
    return path / "out", path / "asked.jsonl"


def stage(name: str, asked: Path, steps: int = 2, more: str = "") -> str:
    return (
        f'{{name: {name}, steps: {steps}, lr: 0.003, data: [{{path: "{asked}"}}], {SAMPLES}, batch_pairs: 4, '
        f"evaluate_every: 0, save_every: 1{more}}}"
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def made(path: Path, *stages: str) -> Recipe:
    return recipe_of(path, *stages, more=ADAMW)


@pytest.mark.parametrize("name", ["reward_model", "preference"])
def test_the_best_of_a_prompts_samples_against_the_worst(ending, tmp_path: Path, name: str) -> None:
    model, asked = ending
    align(made(tmp_path, stage(name, asked, steps=8)), model, tmp_path / "out", quiet=True)
    samples, pairs = (lines(tmp_path / "out/samples" / f"{file}.jsonl") for file in ("samples", "pairs"))
    scores: dict[str, dict[str, float]] = {}
    for line in samples:
        scores.setdefault(line["messages"][-1]["content"], {})[line["text"]] = line["score"]
    assert len(samples) == 36 and pairs
    for pair in pairs:
        of_prompt = scores[pair["messages"][-1]["content"]]
        assert of_prompt[pair["chosen"]] >= 0.5 > of_prompt[pair["rejected"]] == min(of_prompt.values())
    steps = lines(tmp_path / "out/metrics.jsonl")
    assert steps[0]["pairs_made"] == len(pairs) and steps[-1]["pairs_right"] > 0.5


def test_they_are_sampled_once_and_stand_for_later_stages(ending, tmp_path: Path, monkeypatch) -> None:
    model, asked = ending
    stages = (
        stage("reward_model", asked),
        ('{name: preference, steps: 2, lr: 0.003, data: [{path: "stage:1/samples/pairs.jsonl"}], evaluate_every: 0}'),
    )
    align(made(tmp_path, *stages), model, tmp_path / "out", quiet=True)
    monkeypatch.setattr(rejection, "generate", lambda *_: pytest.fail("sampled again"))
    align(made(tmp_path, stages[0], stages[1].replace("steps: 2", "steps: 3")), model, tmp_path / "out", quiet=True)
    assert len(lines(tmp_path / "out/metrics.jsonl")) == 3


def test_what_cannot_be_compared_is_refused(ending, tmp_path: Path) -> None:
    model, asked = ending
    text = stage("reward_model", asked)
    assert_refused(tmp_path, model, text.replace("group: 6", "group: 1"), "one answer has no worse one")
    task = text.replace("{name: length, max_length: 0, slack: 24, unit: characters}", "{name: task}")
    assert_refused(tmp_path, model, task, "task can judge nothing")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="of no prompt there is a completion that scored 0 and one that is worse"):
        align(made(tmp_path, text.replace("right: 0.5", "right: 0.0")), model, tmp_path / "out", quiet=True)
