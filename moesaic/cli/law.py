"""The law of loss curves: fit it to finished runs, predict other schedules, find the best one.

    moesaic law fit out/constant out/cosine --out law.json --loss loss/held_out
    moesaic law predict law.json --schedule wsd decay=0.2 --steps 2000 --png curve.png
    moesaic law predict law.json --run out/wsd
    moesaic law optimize law.json --steps 2000 --out schedule.json

A RUN is the directory of a finished run, or its metrics.jsonl.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json

ORDER = 45
command = typer.Typer(help="Fit the law of loss curves to finished runs, predict other schedules, find the best one.")

Law = Annotated[Path, typer.Argument(metavar="LAW", help="A law file, as law fit writes it.")]
Window = Annotated[
    int | None,
    typer.Option(
        help="Steps that losses are averaged over; by default 2 % of a run, and some fifty at least; held-out: 1.",
        min=1,
    ),
]
MOST = 10_000_000  # steps of a curve, which is worked out step by step
Skip = Annotated[float, typer.Option(help="Share of the steps after warm-up left out at the start.", min=0, max=0.5)]
Peak = Annotated[float | None, typer.Option(help="The greatest learning rate; by default that of the fitted runs.")]
Warmup = Annotated[int | None, typer.Option(help="Steps of warm-up; by default as many as the fitted runs had.", min=0)]
Picture = Annotated[Path | None, typer.Option(help="Draw the curves here.", metavar="FILE", parser=destination.file)]


@command.command()
def fit(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs of one model with different schedules.")],
    out: Annotated[Path, typer.Option(help="Where to write the law.", metavar="FILE", parser=destination.file)],
    loss: Annotated[
        str,
        typer.Option(
            help="Which loss of metrics.jsonl: that of the batches, or loss/held_out, which train.evaluate_every"
            " writes, and which says more because every line is of the same text.",
            metavar="KEY",
        ),
    ] = "loss",
    window: Window = None,
    skip: Skip = 0.1,
    json: JsonFlag = False,
) -> None:
    """Fit the law to two or more runs with different schedules, one of which decays."""
    from moesaic.train.law.fit import fit
    from moesaic.train.law.runs import read_runs

    fitted = fit(read_runs(runs, loss), window, skip)
    fitted.save(out)
    if json:
        return print_json({"out": out, **asdict(fitted)})
    print(
        "L0 {L0:.4g}  A {A:.4g}  alpha {alpha:.3f}  B {B:.4g}  C {C:.4g}  beta {beta:.3f}  gamma {gamma:.3f}".format(
            **asdict(fitted.law)
        )
    )
    for score in fitted.scores:
        _print_score(asdict(score))
    for warning in fitted.warnings:
        print(f"warning: {warning}")
    place = shlex.quote(str(out))
    print(f"wrote {out} after {fitted.seconds:.1f} s; next: moesaic law predict {place} --schedule wsd --steps N")
    print(f"or: moesaic law optimize {place} --steps N --out FILE")


@command.command()
def predict(
    law: Law,
    options: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="The schedule's options.")] = None,
    schedule: Annotated[str | None, typer.Option(help="The schedule, such as wsd.", metavar="NAME")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps in all, warm-up included.", min=1, max=MOST)] = None,
    peak: Peak = None,
    warmup: Warmup = None,
    run: Annotated[Path | None, typer.Option(help="A run to compare with.", metavar="RUN")] = None,
    window: Window = None,
    skip: Skip = 0.1,
    out: Annotated[
        Path | None, typer.Option(help="Write the predicted curve here.", metavar="FILE", parser=destination.file)
    ] = None,
    png: Picture = None,
    json: JsonFlag = False,
) -> None:
    """Predict the loss curve of a schedule. With --run and no --schedule, that of the run itself."""
    from moesaic.train.law.predict import predict

    told = predict(law, schedule, options or [], steps, peak, warmup, run, window, skip)
    report = told.report()
    if out is not None:
        told.save(out)
        report["out"] = out
    if png is not None:
        told.draw(png)
        report["png"] = png
    if json:
        return print_json(report)
    print(f"{told.title}: predicted final loss {told.final:.4f}")
    if told.score is not None:
        _print_score(asdict(told.score))
    _print_ends(told.warnings, [out, png])


@command.command()
def optimize(
    law: Law,
    steps: Annotated[int, typer.Option(help="Steps in all, warm-up included.", min=2, max=MOST)],
    out: Annotated[Path, typer.Option(help="Where to write the schedule.", metavar="FILE", parser=destination.file)],
    peak: Peak = None,
    warmup: Warmup = None,
    floor: Annotated[float, typer.Option(help="The lowest learning rate, as a share of the peak.", min=0, max=1)] = 0.0,
    png: Picture = None,
    json: JsonFlag = False,
) -> None:
    """Find the schedule with the lowest predicted final loss."""
    from moesaic.train.law.predict import optimize

    best, warnings = optimize(law, steps, peak, warmup, floor)
    best.save(out)
    report: dict[str, Any] = {"out": out, "steps": steps, "warmup": best.warmup, "peak": best.peak, "final": best.final}
    report |= {"baselines": best.baselines, "gains": best.gains, "warnings": warnings}
    if png is not None:
        best.draw(png)
        report["png"] = png
    if json:
        return print_json(report)
    print(f"predicted final loss {best.final:.4f}")
    for name, gain in best.gains.items():
        print(f"  {gain:+.4f} below {name:12} {best.baselines[name]:.4f}")
    _print_ends(warnings, [out, png])
    shape = f"train.steps={steps} train.warmup_steps={best.warmup}"
    print(f'next: moesaic train RECIPE --out DIR {shape} "schedule={{name: from_file, path: {out}}}"')


def _print_score(score: dict[str, Any]) -> None:
    print(
        "{run}: R² {r2:.4f}, error {mean_error:.2%} on average and {max_error:.2%} at most; final {final:.4f}, "
        "predicted {predicted_final:.4f} ({final_error:+.2%}); losses are means of {window} steps".format(**score)
    )


def _print_ends(warnings: tuple[str, ...], written: list[Path | None]) -> None:
    for warning in warnings:
        print(f"warning: {warning}")
    for path in written:
        if path is not None:
            print(f"wrote {path}")
