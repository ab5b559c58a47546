"""Resume a run: whether its directory holds checkpoints of the run asked for, their last step, and its dtype."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.model.formats.checkpoint import read_json
from moesaic.recipe import Recipe
from moesaic.recipe_sections import ModelSection
from moesaic.train.checkpoints import Checkpoints
from moesaic.train.law.loss_law import write_json

RESOLVED = "resolved.json"  # what `auto` in the recipe was resolved to, written before the first step
DTYPES = ("float32", "bfloat16", "float16")


def steps_done(recipe: Recipe, out: Path, name: str) -> int:
    """The step of the latest checkpoint in `out`; that of another run is refused. `name` is the run's stage."""
    checkpoints = Checkpoints(out, recipe.train.keep_last, recipe.train.keep_every)
    steps = checkpoints.steps()
    if not steps:
        if (out / "config.json").exists():
            raise UserError(out, "holds a model that no run here has made", "Name another --out.")
        return 0
    life = lineage.read(checkpoints.path(steps[-1]))
    if life and life[-1]["stage"] != name:
        raise UserError(out, f"holds a run of {life[-1]['stage']}, not of {name}", "Name another --out.")
    if steps[-1] > recipe.train.steps:
        problem = f"holds a run of {steps[-1]:,} steps, and train.steps is {recipe.train.steps:,}"
        raise UserError(out, problem, "Name another --out, or as many steps.")
    numbers, _ = checkpoints.read(steps[-1])
    if _filled(numbers["recipe"]["model"]) != recipe.dump()["model"]:
        raise UserError(out, "holds a run of another model than the recipe's", "Name another --out.")
    if (seed := numbers["recipe"]["train"]["seed"]) != recipe.train.seed:
        problem = f"holds a run of seed {seed}, and {recipe.train.seed} is asked for"
        raise UserError(out, problem, "Name another --out, or the seed it was started with.")
    kinds = numbers["recipe"]["train"]["dtype"], recipe.train.dtype
    if "fp8" in kinds and kinds[0] != kinds[1]:
        problem = f"holds a run of train.dtype {kinds[0]}, and {kinds[1]} is asked for"
        raise UserError(out, problem, f"Name another --out, or set train.dtype={kinds[0]}.")
    init = recipe.train.init
    if "init" in numbers and numbers["init"] != fingerprint(init):
        problem = f"was not started from {f'the weights of {init}' if init else 'fresh weights'}"
        raise UserError(out, problem, "Name another --out, or the model it was started from.")
    return steps[-1]


def run_dtype(out: Path) -> str:
    """The dtype of the run in `out`, which resumes in it on any machine: another processor may be fast in another.
    "auto" if there is no run."""
    checkpoints = Checkpoints(out, keep_last=1, keep_every=0)
    if steps := checkpoints.steps():
        return checkpoints.dtype(steps[-1])
    file = out / RESOLVED
    if not file.is_file():
        return "auto"
    try:
        found = read_json(file).get("dtype")
    except UserError as error:
        found = error.problem
    if found not in DTYPES:
        problem = f"does not say which dtype the run was started in ({found})"
        raise UserError(file, problem, "Remove it, and the run starts again.")
    return str(found)


def record_dtype(out: Path, dtype: torch.dtype) -> None:
    """Before the first step, so that a run that is killed before its first checkpoint resumes to the same bits too."""
    write_json(out / RESOLVED, {"dtype": str(dtype).removeprefix("torch.")})


def _filled(model: dict[str, Any]) -> dict[str, Any] | None:
    """With what later versions have added; None if this one does not know all of it."""
    try:
        return ModelSection.model_validate(model).model_dump(mode="json")
    except ValidationError:
        return None


def fingerprint(model: str | None) -> str | None:
    """Of the weights that a directory holds, wherever it lies; fresh weights have none."""
    if model is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(model).glob("*.safetensors")):
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()
