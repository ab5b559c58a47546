"""Laws of training, fitted to your own runs: the loss curve, its best schedule, emergence, and reuse.

    moesaic law fit out/constant out/cosine --out law.json --loss loss/held_out
    moesaic law predict law.json --schedule wsd decay=0.2 --steps 2000 --png curve.png
    moesaic law predict law.json --run out/wsd
    moesaic law optimize law.json --steps 2000 --out schedule.json
    moesaic law emerge out/small out/large --png emergence.png
    moesaic law reuse out/p1 out/p2 out/p3 out/p4 out/p5 out/p6 --out reuse.json

A RUN is the directory of a finished run, or its metrics.jsonl.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.law_emerge import emerge
from moesaic.cli.law_reuse import reuse

if TYPE_CHECKING:
    from moesaic.train.law.optimize import Optimized
    from moesaic.train.law.predict import Predicted

ORDER = 45
command = typer.Typer(
    help="Laws of training: the loss curve, its best schedule, when a task leaves chance, what repetition is worth."
)
command.command()(emerge)
command.command()(reuse)

Law = Annotated[Path, typer.Argument(metavar="LAW", help="A law file, as law fit writes it.")]
Window = Annotated[
    int | None,
    typer.Option(
        help="Steps that losses are averaged over; default: 2 % of a run, about fifty at least; held-out: 1.",
        min=1,
    ),
]
MAX_STEPS = 10_000_000  # of a curve, which is computed step by step
Skip = Annotated[
    float, typer.Option(help="Share of the steps after warmup that is left out at the start.", min=0, max=0.5)
]
Peak = Annotated[float | None, typer.Option(help="Peak learning rate; default: that of the fitted runs.")]
Warmup = Annotated[int | None, typer.Option(help="Warmup steps; default: as many as the fitted runs had.", min=0)]
PlotFile = Annotated[Path | None, typer.Option(help="Plot the curves here.", metavar="FILE", parser=destination.file)]


@command.command()
def fit(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs of one model with different schedules.")],
    out: Annotated[Path, typer.Option(help="Where to write the law.", metavar="FILE", parser=destination.file)],
    loss: Annotated[
        str,
        typer.Option(
            help="Which loss of metrics.jsonl: the training loss, or loss/held_out, which train.evaluate_every"
            " writes, and which is less noisy because it is always measured on the same text.",
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
    steps: Annotated[int | None, typer.Option(help="Total steps, warmup included.", min=1, max=MAX_STEPS)] = None,
    peak: Peak = None,
    warmup: Warmup = None,
    run: Annotated[Path | None, typer.Option(help="A run to compare with.", metavar="RUN")] = None,
    window: Window = None,
    skip: Skip = 0.1,
    out: Annotated[
        Path | None, typer.Option(help="Write the predicted curve here.", metavar="FILE", parser=destination.file)
    ] = None,
    png: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Predict the loss curve of a schedule. With --run and no --schedule, that of the run itself."""
    from moesaic.train.law.predict import predict

    prediction = predict(law, schedule, options or [], steps, peak, warmup, run, window, skip)
    written = _write(prediction, out, png)
    if json:
        return print_json({**prediction.report(), **written})
    print(f"{prediction.title}: predicted final loss {prediction.final:.4f}")
    if prediction.score is not None:
        _print_score(asdict(prediction.score))
    _print_ends(prediction.warnings, written)


@command.command()
def optimize(
    law: Law,
    steps: Annotated[int, typer.Option(help="Total steps, warmup included.", min=2, max=MAX_STEPS)],
    out: Annotated[Path, typer.Option(help="Where to write the schedule.", metavar="FILE", parser=destination.file)],
    peak: Peak = None,
    warmup: Warmup = None,
    floor: Annotated[float, typer.Option(help="Minimum learning rate, as a share of the peak.", min=0, max=1)] = 0.0,
    png: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Find the schedule with the lowest predicted final loss."""
    from moesaic.train.law.predict import optimize

    best, warnings = optimize(law, steps, peak, warmup, floor)
    written = _write(best, out, png)
    if json:
        return print_json({**best.report(), "warnings": warnings, **written})
    print(f"predicted final loss {best.final:.4f}")
    for name, gain in best.gains.items():
        print(f"  {gain:+.4f} below {name:12} {best.baselines[name]:.4f}")
    _print_ends(warnings, written)
    shape = f"train.steps={steps} train.warmup_steps={best.warmup}"
    print(f'next: moesaic train RECIPE --out DIR {shape} "schedule={{name: from_file, path: {out}}}"')


def _print_score(score: dict[str, Any]) -> None:
    print(
        "{run}: R² {r2:.4f}, error {mean_error:.2%} on average and {max_error:.2%} at most; final {final:.4f}, "
        "predicted {predicted_final:.4f} ({final_error:+.2%}); losses are means of {window} steps".format(**score)
    )


def _write(result: Predicted | Optimized, out: Path | None, png: Path | None) -> dict[str, Path]:
    """Save the curve and its plot where they were asked for; where they are."""
    if out is not None:
        result.save(out)
    if png is not None:
        result.draw(png)
    return {name: path for name, path in (("out", out), ("png", png)) if path is not None}


def _print_ends(warnings: tuple[str, ...], written: dict[str, Path]) -> None:
    for warning in warnings:
        print(f"warning: {warning}")
    for path in written.values():
        print(f"wrote {path}")
