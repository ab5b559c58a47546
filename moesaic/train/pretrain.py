"""Pretrain the model of a recipe: prepare its data if needed, then train, or resume."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from moesaic.atomic import exclusive
from moesaic.data.preparation.prepare import prepare
from moesaic.data.preparation.report import progress_bar
from moesaic.data.shards import MANIFEST
from moesaic.recipe import Recipe
from moesaic.train.consumed import fit_tokens
from moesaic.train.loop import train
from moesaic.train.ranks import check_batch, check_parallel, open_world
from moesaic.train.report.metrics import EVENTS, METRICS
from moesaic.train.resume import steps_done
from moesaic.train.run import Run
from moesaic.train.validate import check, check_data, check_whole, model_config


def pretrain(recipe: Recipe, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Returns the run's summary."""
    recipe = fit_tokens(recipe)
    check(recipe)
    layout = check_parallel(recipe, model_config(recipe))
    check_whole(recipe, layout.devices)
    tokens, longest = recipe.train.batch_tokens, recipe.data.sequence_length
    check_batch(layout, recipe.train.accumulate, tokens, longest, "train.batch_tokens")
    world = open_world(recipe, layout)
    data = Path(recipe.train.data) if recipe.train.data else out / "data"
    if not recipe.train.data and not (data / MANIFEST).exists():  # else a column may have been computed since
        check_data(recipe)
    with world.watched(out, (METRICS, EVENTS), EVENTS), exclusive(out) if world.is_main else nullcontext():
        steps_done(recipe, out, "train")  # refuses what is not this run
        if not recipe.train.data and world.is_main:
            with progress_bar() as on_status:
                prepare(recipe, data, on_status=on_status)
        world.barrier()
        run = Run(recipe, out, data, quiet=quiet, world=world)
        world.resumed(run.step, run.report.dropped, run.report.note)
        train(run)
        world.barrier()
    return run.summary
