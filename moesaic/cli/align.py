"""Align a model: supervised fine-tuning, preference optimization, reinforcement learning, as a recipe lists them.

moesaic align recipes/align-tiny.yaml --model out/tiny --out out/aligned
moesaic align recipes/align-tiny.yaml --model out/tiny --out out/aligned align.stages.1.steps=50
moesaic align recipes/rlhf-scaling.yaml --model out/sft --out out/scaling --study
torchrun --nproc-per-node 4 -m moesaic align recipe.yaml --model out/tiny --out out/aligned parallel.ep=4
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Overrides, RecipeFile, RunDirectory
from moesaic.cli.progress import resumable

if TYPE_CHECKING:
    from moesaic.recipe import Recipe

ORDER = 50


def command(
    recipe: RecipeFile,
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model to start from.", show_default=False)],
    overrides: Overrides = None,
    out: RunDirectory = Path("out/aligned"),
    study: Annotated[bool, typer.Option("--study", help="Run what the recipe's section study compares.")] = False,
    json: JsonFlag = False,
) -> None:
    """Align a model: SFT, preference and RL stages of a recipe; the same command resumes a stopped run.

    With --study, every combination of the values in study.axes is run with every seed, below OUT, and a table says what
    each value is worth.
    """
    from moesaic.align.align import align
    from moesaic.recipe import load_recipe

    asked = load_recipe(recipe, overrides or [])
    if study:
        return compare(asked, model, out, json)
    result = align(asked, model, out, quiet=json)
    if json:
        print_json(result)
    if result["stages"][-1]["outcome"] == "stopped":  # so that a script does not go on with half an alignment
        raise typer.Exit(130)


def compare(recipe: Recipe, model: Path, out: Path, json: bool) -> None:
    from moesaic.align.study import RESULT, has_progress, plain, run_study

    with resumable("align", out, has_progress) as on_status:
        found = run_study(recipe, model, out, on_status=on_status, log=lambda text: print(text, file=sys.stderr))
    if json:
        return print_json({"directory": out, **plain(found)})
    print(
        f"{found.text()}\n\nIntervals are 95 % over {len(recipe.study.seeds)} seeds. All numbers are in {out / RESULT}."
    )
