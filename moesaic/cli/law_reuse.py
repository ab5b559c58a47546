"""`moesaic law reuse`: what repeated data is worth; `cli/law.py` lists it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli import destination
from moesaic.cli.app import JsonFlag, print_json


def reuse(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Pilots with different data.unique_tokens and epochs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the law, for data.reuse.", metavar="FILE", parser=destination.file),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Unique tokens of a plan; default: the pilots' most.", min=2)
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of that plan.", min=0)] = None,
    json: JsonFlag = False,
) -> None:
    """What epochs of repeated data are worth, fitted to pilots; how many of them still pay.

    A pilot is a finished run with data.unique_tokens, data.held_out and train.evaluate_every; steps set its epochs. Two
    sizes or more must be there with one epoch, and two or more with several.
    """
    from moesaic.train.law.reuse import fit_reuse, read_pilots

    fitted = fit_reuse(read_pilots(runs))
    size = tokens or max(pilot.tokens for pilot in fitted.pilots)
    plans = [fitted.plan(size, each) for each in ((epochs,) if epochs is not None else (1, 2, 4, 8, 16, 32))]
    if out is not None:
        fitted.save(out)
    if json:
        return print_json({**asdict(fitted), "plans": plans, "out": out})
    for pilot in fitted.pilots:
        worth, told = fitted.law.effective(pilot.epochs, pilot.tokens), fitted.loss(pilot.tokens, pilot.epochs)
        print(
            f"{pilot.run}: {pilot.tokens:,} tokens, {pilot.epochs:.1f} epochs worth {worth:.2f}; "
            f"loss {pilot.loss:.4f}, by the law {told:.4f}"
        )
    others = ", ".join(f"{name} {error:.2%}" for name, error in fitted.others.items())
    print(f"the law ({fitted.law.growth}, {fitted.law.shape}) is {fitted.error:.2%} off on average; {others}")
    for size_, (plateau, low, high) in fitted.plateaus.items():
        print(f"repetition of {size_:,} tokens adds at most {plateau:.2f} epochs' worth ({low:.2f} to {high:.2f})")
    for plan in plans:
        print(
            "{epochs:g} epochs of {tokens:,} tokens: worth {effective_epochs:.2f}, the last adds {marginal:.0%} of"
            " fresh data; loss {loss:.4f}".format(**plan)
        )
    print(f"past {fitted.law.useful(size):.1f} epochs of {size:,} tokens another adds less than half of fresh data")
    for warning in fitted.warnings:
        print(f"warning: {warning}")
    if out is not None:
        print(f"wrote {out}; next: moesaic train RECIPE --out DIR data.reuse={out}")
