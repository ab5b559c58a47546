"""What most tests of alignment begin from: one very small model for each file of tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import moesaic
import moesaic.align.align
from moesaic.align.stages import Stage
from moesaic.model.transformer import Model
from moesaic.recipe import Recipe
from moesaic.train.report.metrics import METRICS, read_metrics
from moesaic.train.run import Run
from tests.serve.made import talking_model

runs = sys.modules["moesaic.align.align"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base: Path) -> Model:
    return moesaic.load(base)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a stage records it has declared, so that a study knows beforehand what can be measured of it."""
    stages: dict[Path, Stage] = {}
    begin = runs.begin

    def noted(recipe: Recipe, stage: Stage, name: str, model: Path, out: Path, *rest: Any, **options: Any) -> Run:
        stages[out] = stage
        return begin(recipe, stage, name, model, out, *rest, **options)

    monkeypatch.setattr(runs, "begin", noted)
    yield
    for out, stage in stages.items():
        keys = {key for line in read_metrics(out) for key in line} if (out / METRICS).is_file() else set()
        assert not {key for key in keys if not any(fnmatchcase(key, known) for known in stage.metrics())}, stage
