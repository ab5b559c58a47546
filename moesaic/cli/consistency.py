"""How regular every document is: its expected accuracy when it is held out, and a cheap proxy beside it.

moesaic consistency recipes/tiny.yaml --out out/consistency
moesaic consistency recipes/tiny.yaml --out out/consistency --models 8 --steps 200
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Overrides, out_directory
from moesaic.cli.progress import resumable

ORDER = 37


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Its documents are scored; its model is trained.")],
    out: Annotated[Path, out_directory("Directory of the models and the result.")],
    overrides: Overrides = None,
    models: Annotated[int, typer.Option(help="Models trained on random halves, an even number.", min=4)] = 4,
    steps: Annotated[int, typer.Option(help="Training steps per model.", min=4, max=10_000_000)] = 60,
    length: Annotated[int, typer.Option(help="Tokens of each document that are predicted, at most.", min=2)] = 512,
    json: JsonFlag = False,
) -> None:
    """Train small models on random halves of the data, and score each document by those that have not seen it.

    The columns consistency and consistency_proxy are kept with the data (train.data, or OUT/data), for
    data.curriculum=consistency and mixtures; the rank correlation of the two is told with its interval. Killed or
    stopped at any moment, the same command resumes.
    """
    from moesaic.recipe import load_recipe
    from moesaic.train.consistency import RESULT, score_documents
    from moesaic.train.proxies import has_progress

    asked = load_recipe(recipe, overrides or [])
    with resumable("consistency", out, has_progress) as on_status:
        found = score_documents(
            asked,
            out,
            models=models,
            steps=steps,
            max_length=length,
            on_status=on_status,
            log=lambda text: print(text, file=sys.stderr),
        )
    if json:
        return print_json({"directory": out, **asdict(found)})
    data = asked.train.data or out / "data"
    print(f"{found.text()}\n\nAll numbers are in {out / RESULT}.")
    print(f"Next: moesaic train {recipe} --out DIR train.data={data} data.curriculum=consistency")
