"""Held-out accuracy at equal steps where few of the prompts teach anything: prompts in turn (uniform), by measured
difficulty (RLCS), by influence on a validation set (CROPI), and its ablations: trajectories that stay as they were
sampled before the first step (cropi-stored), one selection for the whole run (cropi-once), and as many prompts of the
same pool drawn at random (random-share).

    python -m bench.align_selection                        # three seeds, some minutes of one core
    python -m bench.align_selection --seeds 0 --steps 20

The model of recipes/tiny.yaml, after SFT, is asked sums of three or four digits (which is what is measured, on
prompts never learned from), and seven times as many that are too hard for it: sums of two numbers, a form it was
never shown, and long sums of large numbers. The validation set of CROPI is 32 other sums of the kind that is measured,
which no run trains on. Every run trains on equally many completions a step; those that CROPI samples only to choose are
counted beside it, as is the time that a run takes. Runs are kept in out/align_selection: a stopped bench goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.align_tiny import curve, sft_model, timed
from bench.measure import record
from moesaic.align.accuracy import Accuracy
from moesaic.align.align import begin
from moesaic.align.stages import Stage
from moesaic.intervals import across
from moesaic.recipe import load_recipe
from moesaic.train.loop import train

OUT = Path("out/align_selection")
MEASURED = "builtin:sums"
CROPI = f'name: cropi, validation: [{{path: "{MEASURED}", skip: 50000}}], validation_prompts: 32'
SELECTIONS = {
    "uniform": "uniform",
    "rlcs": "{name: rlcs, explore: 0.02}",
    "cropi": f"{{{CROPI}, pool: 160, share: 0.2, every: 8}}",
    "cropi-stored": f"{{{CROPI}, pool: 160, share: 0.2, every: 8, resample: false}}",
    "cropi-once": f"{{{CROPI}, pool: 160, share: 0.2, every: 1000}}",
    "random-share": f"{{{CROPI}, pool: 32, share: 1.0, every: 1000}}",
}
SOURCES = {
    "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1": 3,
    MEASURED: 1,
    "builtin:chain_sum:min_terms=5,max_terms=7,min_digits=2,max_digits=3": 4,
}


def learned(name: str, seed: int, steps: int, every: int, lr: float) -> dict[str, Any]:
    """Held-out accuracy over the steps, what was sampled only to choose, and the seconds it took."""
    out = OUT / f"{name}-{seed}-{steps}-{lr * 1000:g}"  # no dot, after which files beside it would be named alike
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
    recipe, start = load_recipe(file, []), sft_model(seed)[0]

    def run() -> dict[str, Any]:
        run = begin(recipe, recipe.build("align.stages.0", Stage), "policy", start, out, quiet=True)
        run.plots, run.measure = False, Accuracy.of([{"path": MEASURED}], 256, 32)
        train(run)
        return run.summary

    seconds = timed(out, run)
    return {
        "curve": curve(out, "accuracy"),
        "explored": int(sum(value for _, value in curve(out, "explored"))),
        "seconds": round(seconds, 1),
    }


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
    found = {
        (name, seed): learned(name, seed, asked.steps, asked.every, asked.lr)
        for seed in asked.seeds
        for name in asked.selections
    }
    first = [found[asked.selections[0], seed]["curve"] for seed in asked.seeds]
    for name in asked.selections:
        mine = [found[name, seed] for seed in asked.seeds]
        last = [one["curve"][-1][1] for one in mine]
        more = [one - curve[-1][1] for one, curve in zip(last, first, strict=True)]
        bests = [max(accuracy for _, accuracy in one["curve"]) for one in mine]
        row = {
            "selection": name,
            "steps": [reached(one["curve"], asked.target) for one in mine],
            "last": last,
            "mean": across(last),
            "more_than_first": across(more),
            "best": across(bests),
            "steps_to_best_of_first": [
                reached(one["curve"], max(accuracy for _, accuracy in curve))
                for one, curve in zip(mine, first, strict=True)
            ],
            "by_step": {step: across([dict(one["curve"])[step] for one in mine]) for step, _ in mine[0]["curve"]},
            "explored": [one["explored"] for one in mine],
            "seconds": [one["seconds"] for one in mine],
            "curves": {str(seed): one["curve"] for seed, one in zip(asked.seeds, mine)},
        }
        rows.append(row)
        told = ", ".join(f"{step}" if step else f"more than {asked.steps}" for step in row["steps"])
        print(f"{name:13} at the end {row['mean']}, than {asked.selections[0]} {row['more_than_first']:+}", end="; ")
        print(f"best {row['best']}; as good as {asked.selections[0]} ever was after {row['steps_to_best_of_first']}")
        print(" " * 13, ", ".join(f"{step}: {found}" for step, found in row["by_step"].items()))
        print(
            f"steps to {asked.target:.0%}: {told}; sampled only to choose: {row['explored']}; seconds: {row['seconds']}"
        )
    if not asked.no_record:
        print(record("align_selection", rows, target=asked.target, steps=asked.steps, seeds=asked.seeds))


if __name__ == "__main__":
    main()
