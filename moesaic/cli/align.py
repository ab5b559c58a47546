"""Align a model: supervised fine-tuning, preference optimization, reinforcement learning, as a recipe lists them.

moesaic align recipes/align-tiny.yaml --model out/tiny --out out/aligned
moesaic align recipes/align-tiny.yaml --model out/tiny --out out/aligned align.stages.1.steps=50
torchrun --nproc-per-node 4 -m moesaic align recipe.yaml --model out/tiny --out out/aligned parallel.ep=4
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Overrides, RecipeFile, RunDirectory

ORDER = 50


def command(
    recipe: RecipeFile,
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model to start from.", show_default=False)],
    overrides: Overrides = None,
    out: RunDirectory = Path("out/aligned"),
    json: JsonFlag = False,
) -> None:
    """Align a model: SFT, preference and RL stages of a recipe; the same command resumes a stopped run."""
    from moesaic.align.align import align
    from moesaic.recipe import load_recipe

    result = align(load_recipe(recipe, overrides or []), model, out, quiet=json)
    if json:
        print_json(result)
    if result["stages"][-1]["outcome"] == "stopped":  # so that a script does not go on with half an alignment
        raise typer.Exit(130)
