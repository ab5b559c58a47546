"""The recipes that come with the project: every key and every method stands in one, and every line of theirs runs.

The comment at the head of a recipe says how it is run; variants are overrides there. A key or a method is shown if a
recipe has it, or such a line does.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesaic.align.rollouts.rollout import Sample
from moesaic.cli import main
from moesaic.data.curricula import Curriculum
from moesaic.data.quality import QualityScore
from moesaic.methods import known
from moesaic.recipe import Recipe, load_recipe
from moesaic.strict import keys
from moesaic.train.constraints import Constraint
from moesaic.train.objectives import Objective
from moesaic.train.optimizers import OptimizerMethod
from moesaic.train.ranks import check_parallel
from moesaic.train.run import Run
from moesaic.train.schedules import Schedule
from moesaic.train.validate import check, model_config

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
METHODS = {
    "data.curriculum": Curriculum,
    "data.quality": QualityScore,
    "train.constraint": Constraint,
    "train.objective": Objective,
    "optimizer": OptimizerMethod,
    "schedule": Schedule,
}
# Methods that no recipe names: a stage of alignment brings its own objective.
WITHIN = {"train.objective": {"policy", "preference", "reward_model"}}
# Recipes that other tests run: with Ray, on a GPU, with a knowledge base, with a teacher or filters, in the quickstart.
ELSEWHERE = {
    *("agent-tuning", "align-async", "critic", "faithlens", "gpu", "know-search", "quickstart", "quickstart-gpu"),
    "world-planner",
}


@cache
def lines(recipe: Path) -> list[list[str]]:
    """The words of the command lines at a recipe's head."""
    text = re.sub(r"\\\n# *", "", recipe.read_text())
    heads = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    words = [shlex.split(re.split(r"\s{3,}", line)[0]) for line in heads if re.match(r"moesaic |torchrun ", line)]
    return [line[line.index("moesaic") + 1 :] for line in words]


@cache
def written(recipe: Path) -> list[Recipe]:
    """The recipe, and each of its variants."""
    overrides = [
        [word for word in line[2:] if "=" in word]
        for line in lines(recipe)
        if line[0] in ("train", "align") and line[1] == f"recipes/{recipe.name}"
    ]
    return [load_recipe(recipe, given) for given in [[], *overrides]]


def named(section: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that were written, not the defaults; those of a list's entries under a star."""
    for name in section.model_fields_set:
        value = getattr(section, name)
        yield (*above, name)
        for one, under in [(value, (name,))] if not isinstance(value, tuple) else [(one, (name, "*")) for one in value]:
            if hasattr(one, "model_fields_set"):
                yield from named(one, (*above, *under))


def test_every_key_of_a_recipe_is_in_one() -> None:
    shown = {key for file in RECIPES for recipe in written(file) for key in named(recipe)}
    missing = [".".join(key) for key in keys(Recipe) if key[-1] != "*" and not shown & spellings(key)]
    assert missing == []


def spellings(key: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {key, tuple(part for part in key if part != "*")}


@pytest.mark.parametrize("place", METHODS)
def test_every_method_of_pretraining_is_in_one(place: str) -> None:
    shown = set()
    for file in RECIPES:
        for recipe in written(file):
            section, _, key = place.rpartition(".")
            method = getattr(getattr(recipe, section) if section else recipe, key)
            shown |= {method.name} if method is not None else set()
            shown |= {one.name for one in recipe.data.scores} if key == "quality" else set()
    assert set(known(METHODS[place])) - shown - WITHIN.get(place, set()) == set()


def shortened(words: list[str]) -> list[str]:
    """A line with what makes it a matter of a second."""
    made = [word for word in words if not word.startswith(("train.steps=", "data.length_warmup.steps="))]
    if words[0] == "compress":
        return [*made, "--samples", "2"] if "--method" in made else made
    given = yaml.safe_load(Path(words[1]).read_text())
    if words[0] == "align":
        stages = given["align"]["stages"]
        for number, stage in enumerate(stages):
            short = {"steps": 2, "evaluate_every": 0, "save_every": 2}
            small = {"batch_tokens": 512, "prompts": 2, "group": 2, "max_tokens": 4, "evaluate": 2}
            short |= {key: value for key, value in small.items() if key in stage}
            made += [f"align.stages.{number}.{key}={value}" for key, value in short.items()]
            if "samples" in stage:
                made += [
                    f"align.stages.{number}.samples.{key}={small[key]}" for key in ("prompts", "group", "max_tokens")
                ]
            if "environment" in stage:
                made += [f"align.stages.{number}.environment.turns=1"]
        if "--study" in words:
            made += ["study.axes={align.stages.1.group: [2, 3]}", "study.seeds=[0]", "study.measure=reward"]
        return made
    own = any(word.startswith("data.sources=") for word in words)
    numbers = range(0 if own else len(given["data"]["sources"]))
    made += [f"data.sources.{n}.documents=30" for n in numbers]
    made += [f"data.sources.{n}.path=text.txt" for n in numbers if "stdlib" in given["data"]["sources"][n]["path"]]
    if words[1] != "recipes/tiny.yaml" and "tokenizer" not in given["data"]:
        made += ["data.tokenizer=out/tiny"]
    made += ["train.steps=4", "train.warmup_steps=1", "train.save_every=4", "train.batch_tokens=256"]
    made += ["data.sequence_length=64", "train.evaluate_tokens=256"]
    made += ["train.evaluate_every=2", "data.held_out=0.1"] if given["train"].get("evaluate_every") else []
    made = ["train.tokens=1000" if word.startswith("train.tokens=") else word for word in made]
    if given["data"].get("length_warmup"):
        made += ["data.length_warmup.steps=2"]
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the recipes, and the models that they begin with."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "text.txt").write_text("\n\n\n".join(f"def f{n}(x):\n    return {n} * x + {n * n}" for n in range(400)))
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main([*shortened(["train", "recipes/tiny.yaml", "--out", "out/tiny"]), "model.context=2048"]) == 0
    finally:
        os.chdir(before)
    for model in ("smollm2", "mixture"):
        shutil.copytree(folder / "out/tiny", folder / "out" / model)
    (folder / "out/schedule.json").write_text(json.dumps({"factors": [1.0, 0.5, 0.1]}))
    return folder


def anything(samples: list[Sample], rule: object) -> tuple[list[Sample], tuple[Sample, Sample]]:
    return samples[:1], (replace(samples[0], text="1"), replace(samples[1], text="2"))


def any_two(example: object, samples: list[Sample]) -> list[tuple[str, Sample, Sample]]:
    return [("lowercase", *anything(samples, None)[1])]


@pytest.mark.parametrize("recipe", [file for file in RECIPES if file.stem not in ELSEWHERE], ids=lambda file: file.stem)
def test_what_a_recipe_says_runs(recipe: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(Run, "plots", False)
    monkeypatch.setattr("moesaic.train.run.peak_flops", lambda device, dtype: 1e9)  # measuring takes longer than steps
    monkeypatch.setattr("moesaic.align.rollouts.rejection.chosen", anything)  # who knows nothing has no pairs
    monkeypatch.setattr("moesaic.align.rollouts.rejection.constraint_pairs", any_two)
    done = 0
    for words in lines(recipe):
        if words[0] not in ("train", "align", "compress") or words[-2:] == ["--out", "out/tiny"]:
            continue
        if any(word.startswith("parallel.") for word in words) or recipe.stem == "many-devices":
            ranked = load_recipe(words[1], [word for word in words[2:] if "=" in word])
            monkeypatch.setenv("WORLD_SIZE", "8")
            monkeypatch.setenv("RANK", "0")
            check(ranked)
            assert check_parallel(ranked, model_config(ranked)).devices == 8
        else:
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
            assert main(shortened(words)) == 0, " ".join(shortened(words))
        done += 1
    assert done or recipe.stem == "tiny"
