"""Steps until most of the held-out sums are right, where few of the questions teach anything: questions in turn
(uniform), by measured difficulty (RLCS), by influence (CROPI).

    python -m bench.align_selection                        # three seeds, some minutes of one core
    python -m bench.align_selection --seeds 0 --steps 20

The model of recipes/tiny.yaml, after SFT, is asked sums of three or four digits (which is what is measured, on
questions never learned from), and seven times as many that are too hard for it: sums of two numbers, a form it was
never shown, and long sums of large numbers. Every run asks equally many questions a step. Runs are kept in
out/align_selection, so a bench that was stopped goes on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.align_tiny import curve, sft_model
from bench.measure import record
from moesaic.align.accuracy import Accuracy
from moesaic.align.align import begin
from moesaic.align.stages import Stage
from moesaic.recipe import load_recipe
from moesaic.train.loop import train

OUT = Path("out/align_selection")
SELECTIONS = {
    "uniform": "uniform",
    "rlcs": "{name: rlcs, explore: 0.02}",
    "cropi": "{name: cropi, pool: 160, validation: 32, share: 0.2, every: 10}",
}
MEASURED = "builtin:sums"
SOURCES = {
    "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1": 3,
    MEASURED: 1,
    "builtin:chain_sum:min_terms=5,max_terms=7,min_digits=2,max_digits=3": 4,
}


def learned(name: str, seed: int, steps: int, every: int, lr: float) -> list[tuple[int, float]]:
    """Held-out accuracy over the steps."""
    out = OUT / f"{name}-{seed}-{steps}-{lr:g}"
    file = OUT / f"{out.name}.yaml"
    OUT.mkdir(parents=True, exist_ok=True)
    data = ", ".join(f'{{path: "{path}", weight: {weight}}}' for path, weight in SOURCES.items())
    file.write_text(
        f"""
align:
  stages:
    - {{name: policy, steps: {steps}, lr: {lr}, seed: {seed}, prompts: 16, group: 8, max_tokens: 32, save_every: 20,
        evaluate_every: {every}, rewards: [{{name: task}}], objective: {{clip_high: 0.28}}, record_routes: false,
        selection: {SELECTIONS[name]}, data: [{data}]}}
optimizer: {{name: muon, lr: {lr}, weight_decay: 0.0}}
schedule: constant
"""
    )
    recipe = load_recipe(file, [])
    run = begin(recipe, recipe.build("align.stages.0", Stage), "policy", sft_model(seed)[0], out, quiet=True)
    run.plots, run.measure = False, Accuracy.of([{"path": MEASURED}], 256, 32)
    if not run.finished():
        train(run)
    return curve(out, "accuracy")


def reached(found: Sequence[tuple[int, float]], target: float) -> int | None:
    return next((step for step, accuracy in found if accuracy >= target), None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--selections", nargs="+", choices=SELECTIONS, default=list(SELECTIONS))
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--every", type=int, default=4)
    options.add_argument("--lr", type=float, default=0.002)
    options.add_argument("--target", type=float, default=0.8)
    options.add_argument("--no-record", action="store_true", help="print only")
    asked = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name in asked.selections:
        curves = {seed: learned(name, seed, asked.steps, asked.every, asked.lr) for seed in asked.seeds}
        steps = [reached(found, asked.target) for found in curves.values()]
        last = [found[-1][1] for found in curves.values()]
        rows.append({"selection": name, "steps": steps, "last": last, "curves": {str(s): c for s, c in curves.items()}})
        told = ", ".join(f"{step}" if step else f"more than {asked.steps}" for step in steps)
        print(f"{name:10} steps to {asked.target:.0%}: {told:24} accuracy at the end: {statistics.mean(last):.3f}")
    plain = [step or asked.steps for step in rows[0]["steps"]]
    for row in rows[1:]:
        row["ratio"] = statistics.mean(plain) / statistics.mean([step or asked.steps for step in row["steps"]])
        print(f"{row['selection']:10} uniform needs {row['ratio']:.2f} times as many steps")
    if not asked.no_record:
        print(record("align_selection", rows, target=asked.target, steps=asked.steps, seeds=asked.seeds))


if __name__ == "__main__":
    main()
