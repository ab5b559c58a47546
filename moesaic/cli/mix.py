"""Which mixture of sources, or of topics, trains best: small runs with random weights, read by a regression (RegMix).

moesaic mix recipes/topics.yaml --out out/mix
moesaic mix recipes/topics.yaml --out out/mix --proxies 32 --steps 100 --on sums
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import MeasuredOn, MeasuredTokens, Overrides, out_directory
from moesaic.cli.progress import resumable

ORDER = 36


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Its data is mixed; its model is the proxy.")],
    out: Annotated[Path, out_directory("Directory of the proxies and the result.")],
    overrides: Overrides = None,
    proxies: Annotated[int, typer.Option(help="Small runs, each with random weights.", min=4)] = 24,
    steps: Annotated[int, typer.Option(help="Training steps per proxy.", min=1, max=10_000_000)] = 60,
    on: MeasuredOn = None,
    tokens: MeasuredTokens = 65_536,
    max_epochs: Annotated[
        float, typer.Option(help="Epochs of a source or topic that the recipe's own run may take at most.", min=1e-3)
    ] = 4.0,
    json: JsonFlag = False,
) -> None:
    """Train small proxies with random mixtures of sources or topics, and recommend weights.

    Without data.mix_by, sources are mixed; with data.mix_by=topic, topics. Prints the weights, how well losses that
    were left out are predicted, and the section data.phases of a recipe. Killed or stopped at any moment, the same
    command resumes.
    """
    from moesaic.recipe import load_recipe
    from moesaic.train.mixture_proxies import RESULT, find_mixture
    from moesaic.train.proxies import has_progress

    asked = load_recipe(recipe, overrides or [])
    with resumable("mix", out, has_progress) as on_status:
        found = find_mixture(
            asked,
            out,
            proxies=proxies,
            steps=steps,
            on=on,
            tokens=tokens,
            max_epochs=max_epochs,
            on_status=on_status,
            log=lambda text: print(text, file=sys.stderr),
        )
    if json:
        return print_json({"directory": out, **asdict(found)})
    print(f"{found.text()}\n\n{found.snippet()}\n\nAll numbers are in {out / RESULT}; next: put this into {recipe}")
