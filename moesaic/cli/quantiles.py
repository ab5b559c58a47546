"""Which quality quantile of which source trains best: Kaiyuan-2B's quantile data benchmarking.

moesaic quantiles recipes/tiny.yaml --out out/quantiles
moesaic quantiles recipes/tiny.yaml --out out/quantiles --quantiles 3 --steps 60 --seeds 2 --on code
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import MeasuredOn, MeasuredTokens, Overrides, out_directory
from moesaic.cli.progress import resumable

ORDER = 35


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Its sources are compared; its model is the proxy.")],
    out: Annotated[Path, out_directory("Directory of the proxies and the result.")],
    overrides: Overrides = None,
    quantiles: Annotated[
        int, typer.Option(help="Quantiles of equal token share that each source is cut into.", min=2)
    ] = 4,
    column: Annotated[str, typer.Option(help="Column the documents are sorted by: quality, or one of data.scores.")] = (
        "quality"
    ),
    steps: Annotated[int, typer.Option(help="Training steps per proxy.", min=1, max=10_000_000)] = 100,
    seeds: Annotated[int, typer.Option(help="Proxies per quantile; with two or more the noise is known.", min=1)] = 1,
    on: MeasuredOn = None,
    tokens: MeasuredTokens = 65_536,
    json: JsonFlag = False,
) -> None:
    """Train a small proxy on each quality quantile of each source, and recommend a mixture.

    Prints a table of held-out losses and the section data.phases of a recipe. Killed or stopped at any moment, the
    same command resumes. A recipe that holds no text out (data.held_out) has 5 % held out here.
    """
    from moesaic.recipe import load_recipe
    from moesaic.train.proxies import has_progress
    from moesaic.train.quantile_proxies import RESULT, report, run_proxies

    asked = load_recipe(recipe, overrides or [])
    with resumable("quantiles", out, has_progress) as on_status:
        found = run_proxies(
            asked,
            out,
            steps=steps,
            quantiles=quantiles,
            column=column,
            on=on,
            seeds=seeds,
            tokens=tokens,
            on_status=on_status,
            log=lambda text: print(text, file=sys.stderr),
        )
    if json:
        return print_json({"directory": out, **report(found)})
    print(found.table.text())
    if found.noise is not None:
        print(f"Two proxies that differ in their seed alone lie about {1.41 * found.noise:.4f} apart.")
    for warning in dict.fromkeys(found.warnings):
        print(f"warning: {warning}")
    print(f"\n{found.table.snippet()}\n\nAll numbers are in {out / RESULT}; next: put this into {recipe}")
