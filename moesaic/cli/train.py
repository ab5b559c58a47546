"""Train a model from a recipe.

moesaic train recipes/tiny.yaml --out out/tiny
moesaic train recipes/tiny.yaml --out out/tiny train.steps=400 optimizer.lr=0.003
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json

ORDER = 40


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="In place of what the recipe says.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The run; gone on with if it is there.")] = Path(
        "out/run"
    ),
    json: JsonFlag = False,
) -> None:
    """Train a model; a run that was stopped goes on where it was."""
    from moesaic.recipe import load_recipe
    from moesaic.train.pretrain import pretrain

    result = pretrain(load_recipe(recipe, overrides or []), out, quiet=json)
    if json:
        print_json(result)
