"""Align a model: supervised fine-tuning, preferences, reinforcement learning, in the order a recipe says.

moesaic align recipes/align-tiny.yaml --model out/tiny --out out/aligned
moesaic align recipes/align-tiny.yaml --model out/tiny --out out/aligned align.stages.1.steps=50
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json

ORDER = 50


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.", show_default=False)],
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model to begin with.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="In place of what the recipe says.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", parser=destination.directory, help="The run; gone on with if it is there."
        ),
    ] = Path("out/aligned"),
    json: JsonFlag = False,
) -> None:
    """Align a model in stages; a run that was stopped goes on where it was."""
    from moesaic.align.align import align
    from moesaic.recipe import load_recipe

    result = align(load_recipe(recipe, overrides or []), model, out, quiet=json)
    if json:
        print_json(result)
