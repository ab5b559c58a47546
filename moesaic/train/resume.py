"""Whether what lies in a run's directory is the run that is asked for, and how far it is, before anything is made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.recipe import ModelSection, Recipe
from moesaic.train.checkpoints import Checkpoints


def steps_done(recipe: Recipe, out: Path, name: str) -> int:
    """The last step that is kept in `out` of this very run; another's is refused. `name` is that of its stage."""
    checkpoints = Checkpoints(out, recipe.train.keep_last, recipe.train.keep_every)
    steps = checkpoints.steps()
    if not steps:
        if (out / "config.json").exists():
            raise UserError(out, "holds a model that no run here has made", "Name another --out.")
        return 0
    if steps[-1] > recipe.train.steps:
        problem = f"holds a run of {steps[-1]:,} steps, and train.steps is {recipe.train.steps:,}"
        raise UserError(out, problem, "Name another --out, or as many steps.")
    numbers, _ = checkpoints.read(steps[-1])
    if _filled(numbers["recipe"]["model"]) != recipe.dump()["model"]:
        raise UserError(out, "holds a run of another model than the recipe's", "Name another --out.")
    if (seed := numbers["recipe"]["train"]["seed"]) != recipe.train.seed:
        problem = f"holds a run of seed {seed}, and {recipe.train.seed} is asked for"
        raise UserError(out, problem, "Name another --out, or the seed it was begun with.")
    life = lineage.read(checkpoints.path(steps[-1]))
    if life and life[-1]["stage"] != name:
        raise UserError(out, f"holds a run of {life[-1]['stage']}, not of {name}", "Name another --out.")
    init = recipe.train.init
    if "init" in numbers and numbers["init"] != fingerprint(init):
        problem = f"was not begun from {f'the weights of {init}' if init else 'fresh weights'}"
        raise UserError(out, problem, "Name another --out, or the model it was begun from.")
    return steps[-1]


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
