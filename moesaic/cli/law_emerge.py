"""`moesaic law emerge`: at which loss a task leaves chance; `cli/law.py` lists it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json


def emerge(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Runs with scores.jsonl, of several sizes at best.")
    ],
    suite: Annotated[str | None, typer.Option(metavar="NAME", help="The suite, where several were evaluated.")] = None,
    score: Annotated[str, typer.Option(metavar="KEY", help="Which of its numbers, such as by_kind.gcd.")] = "accuracy",
    chance: Annotated[
        float | None, typer.Option(help="The score of guessing, where it is known; default: fitted.", min=0, max=1)
    ] = None,
    loss: Annotated[str, typer.Option(metavar="KEY", help="The loss: loss, or loss/held_out.")] = "loss",
    window: Annotated[int | None, typer.Option(help="Steps around a checkpoint that losses are averaged over.")] = None,
    law: Annotated[
        Path | None,
        typer.Option(metavar="LAW", help="Predict the step at which a run with this loss law leaves chance."),
    ] = None,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="With --law: the schedule of that run.")] = "constant",
    steps: Annotated[int | None, typer.Option(help="With --law: its steps.", min=1, max=10_000_000)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the fit here.", metavar="FILE", parser=destination.file)
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Plot it here.", metavar="FILE", parser=destination.file)] = None,
    json: JsonFlag = False,
) -> None:
    """At which pretraining loss a task leaves chance, from the checkpoints of runs.

    moesaic evaluate RUN --suite NAME --checkpoints writes the scores. A threshold is compared with a straight line and
    with a smooth bend, and is only called emergence where it fits clearly better.
    """
    from moesaic.errors import UserError
    from moesaic.train.law.coming import coming as predicted_step
    from moesaic.train.law.emergence import emergence
    from moesaic.train.law.loss_law import write_json
    from moesaic.train.law.scores import read_points

    if law is not None and steps is None:
        raise UserError("--steps", "missing", "Say how many steps the run of --law would have.")
    points, asked = read_points(runs, suite, score, loss, window)
    found = emergence(points, chance, asked)
    coming = predicted_step(found, law, schedule, steps, loss) if law is not None and steps is not None else None
    if out is not None:
        write_json(out, {"format": 1, **asdict(found), "coming": coming})
    if png is not None:
        from moesaic.train.law.plot_emergence import draw

        draw(png, found, score)
    if json:
        return print_json({**asdict(found), "coming": coming})
    print(found.text())
    others = ", ".join(f"{name} {value:+.1f}" for name, value in found.criteria.items() if value > 0)
    print(f"against the best of the four curves ({min(found.criteria, key=lambda n: found.criteria[n])}): {others}")
    for run in found.runs:
        crossed = "above the threshold" if run.crossed is None else f"below it from step {run.crossed:,} on"
        own = f"; by itself {run.threshold:.3f}" if run.threshold is not None else ""
        apart = f"; {run.distance:+.1%} from the others at equal loss" if run.distance is not None else ""
        told = f" {crossed}{own}{apart}" if found.seen else ""
        print(
            f"  {run.run}: {run.points} checkpoints, loss {run.lowest:.3f}, best score {run.best:.1%};{told}".rstrip(
                ";"
            )
        )
    for warning in found.warnings:
        print(f"warning: {warning}")
    if coming is not None:
        print(coming["text"])
    for path in (out, png):
        if path is not None:
            print(f"wrote {path}")
