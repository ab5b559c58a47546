"""Text to a tokenizer and token shards, which training reads.

moesaic prepare recipes/tiny.yaml --out out/tiny-data
moesaic prepare recipes/tiny.yaml --out out/tiny-data data.dedupe.near=true --strict
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json, stopped

ORDER = 30


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe whose section data is prepared.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", parser=destination.directory, help="Where the prepared data goes.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE ...]", help="Keys to change in the recipe.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first record that cannot be read.")] = False,
    json: JsonFlag = False,
) -> None:
    """Turn text into a tokenizer and token shards.

    Killed or stopped at any moment, the same command goes on where it was, with the same result.
    """
    from moesaic.data.preparation.prepare import begun, prepare
    from moesaic.data.preparation.report import drawn, summary
    from moesaic.recipe import load_recipe

    asked = load_recipe(recipe, overrides or [])
    try:
        with drawn() as show:
            prepared = prepare(asked, out, strict=strict, show=show)
    except KeyboardInterrupt:
        raise stopped("prepare", out, begun(out)) from None
    if json:
        print_json({"directory": prepared.directory, "already": prepared.already, **prepared.manifest})
    else:
        print(summary(prepared, recipe))
