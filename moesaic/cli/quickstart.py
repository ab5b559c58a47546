"""The whole life of a tiny mixture-of-experts model on this machine, in minutes.

moesaic quickstart
moesaic quickstart --no-serve
moesaic quickstart --out out/another align.stages.1.steps=80
moesaic quickstart --model smollm2
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
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where everything goes; else out/quickstart.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="smollm2|SRC", help="Begin with a real model and pretrain nothing; SRC is what convert takes."
        ),
    ] = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="End when the model is made.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 takes a free one.")] = 8000,
) -> None:
    """Make a model from nothing and talk to it: data, loss law, pretraining, alignment, 4 bits, a page.

    Some minutes on two cores. What is done is kept: stop it with Ctrl-C and the same command goes on. On a terminal it
    ends with a page to talk to the model; elsewhere it asks the served model a question itself, and ends.
    """
    from rich.console import Console

    from moesaic.quickstart.life import FAMILY, Life
    from moesaic.quickstart.real import RealLife
    from moesaic.quickstart.talk import talk
    from moesaic.quickstart.tiny import TinyLife

    console, given = Console(highlight=False), tuple(overrides or ())
    life: Life
    if model is None:
        life = TinyLife(out or Path("out/quickstart"), console, overrides=given)
    else:
        life = RealLife(out or Path(f"out/quickstart-{Path(model).stem}"), console, source=model, overrides=given)
    report = life.run()
    console.print(f"\nIts life in pictures: [bold]{report}[/bold]", soft_wrap=True)
    if not no_serve:
        talk(list(life.models().values())[-1], FAMILY, port, console, person=sys.stdin.isatty() and sys.stdout.isatty())
