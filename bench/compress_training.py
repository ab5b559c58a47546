"""What training under a constraint needs: XTC's long schedules, NxMTransformer's ADMM and ISS's group Lasso, beside
their ablations.

    python -m bench.compress_training                          two minutes of CPU time
    python -m bench.compress_training --scale 10               ten times the steps, for an idle machine or a GPU

A tiny dense model learns sequences with a rule; it is the teacher of students with one bit a weight, and is tuned to
another rule under 1:4 sparsity. Of tiny mixtures a quarter of the hidden units stays while they are trained on. Losses
are on sequences that no run sees. Recorded in bench/results/.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.measure import record
from moesaic.methods import Method
from moesaic.model import directory
from moesaic.model.config import Dense, GroupedQuery, Layer, Rope
from moesaic.model.transformer import Model
from tests.train.small import small_mixture
from tests.train.tiny_runs import CONFIG as MIXTURE
from tests.train.tiny_runs import VOCAB, loss_of, trained

CONFIG = small_mixture(VOCAB, 32, GroupedQuery(2, 1, 16), Rope(8), [Layer(Dense(64)), Layer(Dense(64))], init_std=0.1)
BINARY = Method("quantized", {"bits": 1, "group": 32})
TERNARY = Method("quantized", {"bits": 2, "group": 32, "ternary": True})
PRUNED_FIRST = {"rho": 0.0, "settle": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all numbers of steps")
    scale = parser.parse_args().scale
    rows: list[dict[str, Any]] = []

    def tell(what: str, steps: int, loss: float) -> None:
        rows.append({"what": what, "steps": steps, "loss": round(loss, 4)})
        print(f"{what:58} {steps:6} steps  loss {loss:.4f}", flush=True)
        record("compress_training", rows, scale=scale)

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        long, short = round(400 * scale), round(80 * scale)
        teacher = trained(Model(CONFIG).initialize(0), place / "teacher", 1, long, 0.005)
        tell("teacher, float32", long, loss_of(teacher, 1))
        directory.save(teacher, place / "model")

        def student(name: str, start: Model, steps: int, lr: float, constraint: Method, hidden: float = 0.0) -> Model:
            objective = Method("distill", {"teacher": str(place / "model"), "hidden": hidden})
            made = trained(start, place / name, 1, steps, lr, constraint=constraint, objective=objective)
            return made

        for lr in (0.001, 0.005):
            tell(f"binary, one stage, lr {lr}", short, loss_of(student(f"s{lr}", teacher, short, lr, BINARY), 1))
        third = short // 3
        staged = student("a", teacher, third, 0.005, TERNARY, hidden=1.0)
        staged.ops = None  # type: ignore[assignment]  # the next stage puts its own
        staged = student("b", staged, third, 0.005, BINARY, hidden=1.0)
        staged.ops = None  # type: ignore[assignment]
        staged = student("c", staged, short - 2 * third, 0.005, BINARY)
        tell("binary, three stages (ternary, hidden states, logits)", short, loss_of(staged, 1))
        tell("binary, one stage, lr 0.005", long, loss_of(student("l", teacher, long, 0.005, BINARY), 1))
        tell("ternary, one stage, lr 0.005", long, loss_of(student("t", teacher, long, 0.005, TERNARY), 1))
        for name, options in (
            ("pruned by magnitude first", PRUNED_FIRST),
            ("ADMM", {}),
            ("ADMM, rho 0.3", {"rho": 0.3}),
        ):
            form = Method("nm", {"n": 1, "m": 4, **options})
            made = trained(teacher, place / f"nm-{name}", 2, long, 0.003, constraint=form)
            tell(f"1:4 tuned to another rule: {name}", long, loss_of(made, 2))
        for seed in range(2):
            whole = trained(Model(MIXTURE).initialize(seed), place / f"whole-{seed}", 1, long, 0.005)
            tell(f"all units, seed {seed}", long, loss_of(whole, 1))
            for name, options in (
                ("group Lasso (ISS)", {}),
                ("the largest half way", {"penalty": 0.0}),
                ("the largest first", {"penalty": 0.0, "settle": 1.0}),
            ):
                form = Method("iss", {"keep": 0.25, **options})
                made = trained(whole, place / f"iss-{seed}-{name}", 1, long, 0.003, constraint=form)
                tell(f"a quarter of the units, seed {seed}: {name}", long, loss_of(made, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
