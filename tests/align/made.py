"""A very small reward model, whose head says something of every token; recipes of a few stages, and bad ones."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from moesaic.align.align import align
from moesaic.errors import UserError
from moesaic.recipe import Recipe, load_recipe

TIMED = {"seconds", "tokens_per_second", "mfu"}
ADAMW = "optimizer: {name: adamw, lr: 0.001, weight_decay: 0.0}"


@functools.cache
def reward_directory() -> Path:
    import torch

    import moesaic
    from moesaic.model import directory
    from moesaic.model.value_head import give_head
    from tests.serve.made import talking_model

    place = Path(tempfile.mkdtemp(prefix="reward-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    model = moesaic.load(talking_model(place / "plain"))
    torch.nn.init.normal_(give_head(model).weight, std=0.3)
    directory.save(model, place / "headed")
    return place / "headed"


def without_times(found: list[dict[str, Any]], also: set[str] = frozenset()) -> list[dict[str, Any]]:
    """Lines of metrics, without what no two runs have in common."""
    timed = TIMED | also
    return [{key: value for key, value in line.items() if key not in timed and key[:5] != "time/"} for line in found]


def recipe_of(directory: Path, *stages: str, more: str = "") -> Recipe:
    """A recipe of these stages, written to a file as a user would."""
    file = directory / "align.yaml"
    file.write_text(f"align: {{stages: [{', '.join(stages)}]}}\n{more}\n")
    return load_recipe(file, [])


def assert_refused(directory: Path, base: Path, stage: str, message: str) -> None:
    """A run of one stage ends at once with this message."""
    with pytest.raises(UserError, match=message):
        align(recipe_of(directory, stage, more=ADAMW), base, directory / "out", quiet=True)


def assert_line_refused(directory: Path, base: Path, stage: str, line: str, message: str) -> None:
    """The same of a stage whose data is a file that holds this line."""
    file = directory / "bad.jsonl"
    file.write_text(line)
    assert_refused(directory, base, f'{{name: {stage}, data: [{{path: "{file}"}}]}}', message)
