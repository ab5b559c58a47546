"""Pretrain a model from a recipe.

moesaic train recipes/tiny.yaml --out out/tiny
moesaic train recipes/tiny.yaml --out out/tiny train.steps=400 optimizer.lr=0.003
moesaic train --keys                             every key of a recipe, with its default and meaning
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Overrides, RecipeFile, RunDirectory

ORDER = 40


def _print_keys(asked: bool) -> None:
    if asked:
        from moesaic.recipe_keys import keys

        print(keys())
        raise typer.Exit


def command(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: RunDirectory = Path("out/run"),
    json: JsonFlag = False,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="List every key that a recipe may have.", callback=_print_keys, is_eager=True),
    ] = False,
) -> None:
    """Pretrain a model from a recipe; the same command resumes a stopped run.

    The recipe's data is prepared first, unless train.data names prepared data. Ctrl-C saves a checkpoint and stops.
    DIR is a model directory from the first checkpoint on, with metrics.jsonl and training.png.
    """
    from moesaic.recipe import load_recipe
    from moesaic.train.pretrain import pretrain

    result = pretrain(load_recipe(recipe, overrides or []), out, quiet=json)
    if json:
        print_json(result)
    if result["outcome"] == "stopped":  # so that a script does not go on with half a model
        raise typer.Exit(130)
