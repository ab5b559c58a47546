"""Any model to a model directory.

moesaic convert smollm2 out/smollm2                             the real SmolLM2-135M-Instruct, from its wheel
moesaic convert models/Qwen3-30B-A3B out/qwen --dtype bfloat16
moesaic convert model.gguf out/model
moesaic convert out/smollm2 out/mixture --upcycle experts=8,topk=2
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json

ORDER = 10


def command(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A Hugging Face directory, a GGUF file, or `smollm2`.", show_default=False),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", parser=destination.directory, help="The directory to write.", show_default=False),
    ],
    upcycle: Annotated[
        str | None,
        typer.Option(
            metavar="experts=E,topk=K",
            help="Make a dense model a mixture that answers the same. Also: split=S (experts are slices of the dense "
            "network), perturb=P (noise, as a share of each matrix's spread), seed=N.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Store the weights as this.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a model directory.")] = False,
    json: JsonFlag = False,
) -> None:
    """Turn a Hugging Face directory or a GGUF file into a model directory."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from moesaic.atomic import spare
    from moesaic.errors import UserError
    from moesaic.model import directory, lineage
    from moesaic.model.facts import facts
    from moesaic.model.formats.checkpoint import Source
    from moesaic.model.upcycle import Upcycle
    from moesaic.model.upcycle import upcycle as write_upcycled

    settings = Upcycle.parse(upcycle) if upcycle is not None else None
    opened: Source = directory.open_source(source)
    spare(out, opened.place)
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(out, "exists already", "Name another directory, or add --force to replace it.")
    import torch

    kind = getattr(torch, dtype) if dtype else None
    life = lineage.read(opened.place) if opened.place.is_dir() else []
    asked = {"upcycle": upcycle} if upcycle else {}
    life = [*life, lineage.stage("convert", source=Path(source).name, **asked, **({"dtype": dtype} if dtype else {}))]
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=json) as bar:
        task = bar.add_task("writing")

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if settings:
            config = write_upcycled(opened, out, settings, life=life, dtype=kind, progress=progress)
        else:
            config = directory.convert(opened, out, life=life, dtype=kind, progress=progress)
    known = facts(config)
    if json:
        print_json(
            {
                "directory": str(out),
                "family": config.family,
                "parameters": known.parameters,
                "active_parameters": known.active_parameters,
            }
        )
        return
    from moesaic.cli.show import count

    active = f", {count(known.active_parameters)} active" if config.has_experts else ""
    print(f"{out}: {config.family}, {count(known.parameters)} parameters{active}.")
    print(f"Look at it: moesaic show {shlex.quote(str(out))}")
