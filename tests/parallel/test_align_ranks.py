"""Supervised fine-tuning on several ranks: the bits of one process, evaluation included; others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.align.align import align
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import COMMON, as_rank, assert_same, prepared, run

SFT = "{name: sft, steps: 4, lr: 0.003, data: [{path: 'builtin:sums'}], batch_tokens: 512, max_length: 128,"
SFT += " evaluate_every: 2, evaluate: 4, max_tokens: 8, save_every: 4}"
RECIPE = Path(__file__).parents[2] / "recipes/align-tiny.yaml"


def tune(model: Path, out: Path, *overrides: str, stage: str = SFT) -> None:
    align(load_recipe(RECIPE, [f"align.stages=[{stage}]", COMMON[-1], *overrides]), model, out, quiet=True)


def tune_alone(folder: Path, stages: dict[str, str]) -> None:
    """A model, and what each of these stages makes of it in one process."""
    run("glm", prepared(folder / "data"), folder / "model", "train.steps=2", "train.save_every=2")
    for name, stage in stages.items():
        tune(folder / "model", folder / name, "train.accumulate=2", stage=stage)


def on_two(rank: int, world: int, folder: Path) -> None:
    as_rank(rank, world)
    tune(folder / "model", folder / "dp", "parallel.exact=true", "parallel.zero=3")
    tune(folder / "model", folder / "ep", "parallel.exact=true", "parallel.ep=2")
    with pytest.raises(UserError, match="reward_model is trained by one process"):
        tune(folder / "model", folder / "no", stage="{name: reward_model, data: [{path: 'builtin:sums'}]}")
    with pytest.raises(UserError, match="Nearest that works: align.stages.0.batch_tokens=128"):
        tune(folder / "model", folder / "no", stage=SFT.replace("512", "100"))


def test_fine_tuning_on_two_ranks(tmp_path: Path) -> None:
    tune_alone(tmp_path, {"one": SFT})
    on_ranks(2, on_two, tmp_path, tmp_path)
    for layout in ("dp", "ep"):
        assert_same(tmp_path / layout, tmp_path / "one")
