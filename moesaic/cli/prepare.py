"""Prepare training data: text to a tokenizer and token shards.

moesaic prepare recipes/tiny.yaml --out out/tiny-data
moesaic prepare recipes/tiny.yaml --out out/tiny-data data.dedupe.near=true --strict
moesaic prepare recipes/tiny.yaml --out /shared/data --engine ray --address auto
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from moesaic.cli.app import JsonFlag, print_json, stopped
from moesaic.cli.options import Overrides, out_directory
from moesaic.errors import UserError

ORDER = 30


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe; its section data is prepared.")],
    out: Annotated[Path, out_directory("Directory of the prepared data.")],
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first record that cannot be read.")] = False,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(
            "--engine", help="Who reads and tokenizes: this process or a Ray cluster. The result is the same."
        ),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="With --engine ray: a running cluster, or auto. By default one is started here."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Tokenize text: deduplicate it, score its quality, train a tokenizer, write token shards.

    Killed or stopped at any moment, the same command resumes, with the same result.
    """
    from moesaic.data.preparation.on_ray import RayExaminer
    from moesaic.data.preparation.prepare import has_progress, prepare
    from moesaic.data.preparation.report import progress_bar, summary
    from moesaic.recipe import load_recipe

    if address is not None and engine != "ray":
        raise UserError("--address", "is of a Ray cluster, and none is asked for", "Add --engine ray.")
    asked = load_recipe(recipe, overrides or [])
    try:
        with ExitStack() as stack:
            examiner = stack.enter_context(RayExaminer(address).cluster()) if engine == "ray" else None
            on_status = stack.enter_context(progress_bar())
            prepared = prepare(asked, out, strict=strict, on_status=on_status, examiner=examiner)
    except KeyboardInterrupt:
        raise stopped("prepare", out, has_progress(out)) from None
    if json:
        print_json({"directory": prepared.directory, "already": prepared.already, **prepared.manifest})
    else:
        print(summary(prepared, recipe))
