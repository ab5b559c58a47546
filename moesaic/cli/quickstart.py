"""The whole life of a tiny mixture-of-experts model on this machine, in minutes.

moesaic quickstart
moesaic quickstart --no-serve
moesaic quickstart --out out/another align.stages.1.steps=80
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

ORDER = 0


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="In place of what the recipes say.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything goes.")] = Path("out/quickstart"),
    no_serve: Annotated[bool, typer.Option("--no-serve", help="End when the model is made.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 takes a free one.")] = 8000,
) -> None:
    """Make a model from nothing and talk to it: data, loss law, pretraining, alignment, 4 bits, a page.

    Some minutes on two cores. What is done is kept: stop it with Ctrl-C and the same command goes on. On a terminal it
    ends with a page to talk to the model; elsewhere it asks the served model a question itself, and ends.
    """
    from rich.console import Console

    from moesaic.quickstart.life import FAMILY, Life
    from moesaic.quickstart.talk import talk

    console = Console(highlight=False)
    life = Life(out, console, overrides=tuple(overrides or ()))
    report = life.run()
    console.print(f"\nIts life in pictures: [bold]{report}[/bold]", soft_wrap=True)
    if not no_serve:
        talk(life.models()["in 4 bits"], FAMILY, port, console, person=sys.stdin.isatty() and sys.stdout.isatty())
