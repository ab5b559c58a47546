"""The whole life of a tiny mixture-of-experts model on this machine, in minutes.

moesaic quickstart
moesaic quickstart --no-serve
moesaic quickstart --out out/another align.stages.1.steps=80
moesaic quickstart --model smollm2
moesaic quickstart --gpu
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.options import out_directory

ORDER = 0


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys of the recipes.")
    ] = None,
    out: Annotated[Path | None, out_directory("Directory of everything; default: out/quickstart.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="smollm2|SRC", help="Start from a real model instead of pretraining; SRC is what convert takes."
        ),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="A model of 100 M parameters, in about ten minutes on one GPU.")
    ] = False,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Do not serve the model at the end.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0: a free one.")] = 8000,
) -> None:
    """Train a tiny model from scratch and chat with it: data, loss law, pretraining, SFT, GRPO, 4-bit quantization.

    Some minutes on two cores. Stop it with Ctrl-C and the same command resumes. On a terminal it ends with a web page
    to chat with the model; elsewhere it sends the served model one request, and ends.
    """
    from rich.console import Console
    from rich.markup import escape

    from moesaic.errors import UserError
    from moesaic.quickstart.chat import serve_finished
    from moesaic.quickstart.gpu import GpuLife, check_gpu
    from moesaic.quickstart.life import Life
    from moesaic.quickstart.real import RealLife
    from moesaic.quickstart.tiny import TinyLife

    console, given = Console(highlight=False), tuple(overrides or ())
    life: Life
    if gpu and model is not None:
        raise UserError("--gpu", "pretrains a model, and --model brings one", "Leave one of them out.")
    if gpu:
        check_gpu()
        life = GpuLife(out or Path("out/quickstart-gpu"), console, overrides=given)
    elif model is None:
        life = TinyLife(out or Path("out/quickstart"), console, overrides=given)
    else:
        life = RealLife(out or Path(f"out/quickstart-{Path(model).stem}"), console, source=model, overrides=given)
    report = life.run()
    console.print(f"\nReport: [bold]{escape(str(report))}[/bold]", soft_wrap=True)
    if not no_serve:
        person = sys.stdin.isatty() and sys.stdout.isatty()
        serve_finished(list(life.models().values())[-1], life.family, port, console, person=person)
