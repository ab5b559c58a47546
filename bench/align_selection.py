"""Steps until most of the held-out sums are right: questions in turn (uniform), by measured difficulty
(RLCS), by influence (CROPI).

    python -m bench.align_selection                        # three seeds, several minutes on two cores
    python -m bench.align_selection --seeds 0 --steps 40

A very small mixture model that was taught sums until it knew some of them is asked three kinds of questions: sums of
digits, sums of numbers to 49 (which is what is measured, on questions never learned from), and sums of four numbers to
999, which it cannot do. Runs are kept in out/align_selection, so a bench that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.align_tiny import base, questions, write_files
from bench.measure import record
from moesaic.align.align import begin
from moesaic.align.examples import Example
from moesaic.align.rewards.exact import Exact
from moesaic.align.rollout import roll
from moesaic.align.stages import Stage
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.serve.engine import Engine
from moesaic.train.loop import train

SELECTIONS = {
    "uniform": "uniform",
    "rlcs": "{name: rlcs, pool: 300}",
    "cropi": "{name: cropi, pool: 144, validation: 24, share: 0.25, every: 10}",
}


class HeldOut:
    """The share of questions to numbers to 49 that are answered rightly, greedily."""

    def __init__(self, count: int) -> None:
        self.examples = [
            Example(({"role": "user", "content": one["question"]},), one["answer"])
            for one in questions("middle", count, held_out=True)
        ]

    def __call__(self, model: Model) -> dict[str, float]:
        engine = Engine(model, seed=0)
        wishes = {"max_tokens": 6, "temperature": 0.0}
        rolled = roll(engine, self.examples, 1, wishes, [("exact", 1.0, Exact())], [0] * len(self.examples))
        return {"accuracy": sum(group[0].judged.total for group in rolled.groups) / len(self.examples)}


def curve(
    folder: Path, model: Path, name: str, seed: int, steps: int, every: int, lr: float
) -> list[tuple[int, float]]:
    out = folder / f"{name}-{seed}-{steps}-{lr:g}"
    file = folder / f"{out.name}.yaml"
    file.write_text(
        f"""
align:
  stages:
    - {{name: policy, steps: {steps}, lr: {lr}, seed: {seed}, prompts: 12, group: 8, max_tokens: 6, save_every: 20,
        evaluate_every: {every}, rewards: [{{name: exact}}], objective: {{clip_high: 0.28}}, record_routes: false,
        selection: {SELECTIONS[name]},
        data: [{{path: {folder}/easy.jsonl}}, {{path: {folder}/middle.jsonl}},
               {{path: {folder}/hard.jsonl, weight: 2}}]}}
optimizer: {{name: adamw, lr: 0.001, betas: [0.9, 0.95], weight_decay: 0.0}}
schedule: constant
"""
    )
    recipe = load_recipe(file, [])
    run = begin(recipe, recipe.build("align.stages.0", Stage), "policy", model, out, quiet=True)
    run.draws, run.measure = False, HeldOut(200)
    if not run.finished():
        train(run)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line]


def reached(found: Sequence[tuple[int, float]], target: float) -> int | None:
    return next((step for step, accuracy in found if accuracy >= target), None)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--every", type=int, default=10)
    options.add_argument("--lr", type=float, default=0.0002)
    options.add_argument("--target", type=float, default=0.8)
    options.add_argument("--taught", type=int, default=600, help="steps of supervised fine-tuning before")
    options.add_argument("--folder", type=Path, default=Path("out/align_selection"))
    asked = options.parse_args()
    model = base(asked.folder, asked.taught)
    write_files(asked.folder, {"easy": 60, "middle": 1500, "hard": 500})
    rows: list[dict[str, Any]] = []
    for name in SELECTIONS:
        curves = {s: curve(asked.folder, model, name, s, asked.steps, asked.every, asked.lr) for s in asked.seeds}
        steps = [reached(found, asked.target) for found in curves.values()]
        last = [found[-1][1] for found in curves.values()]
        rows.append({"selection": name, "steps": steps, "last": last, "curves": {str(s): c for s, c in curves.items()}})
        told = ", ".join(f"{step}" if step else f"more than {asked.steps}" for step in steps)
        print(f"{name:10} steps to {asked.target:.0%}: {told:24} accuracy at the end: {statistics.mean(last):.3f}")
    plain = [step or asked.steps for step in rows[0]["steps"]]
    for row in rows[1:]:
        row["ratio"] = statistics.mean(plain) / statistics.mean([step or asked.steps for step in row["steps"]])
        print(f"{row['selection']:10} uniform needs {row['ratio']:.2f} times as many steps")
    print(record("align_selection", rows, target=asked.target, steps=asked.steps, seeds=asked.seeds))


if __name__ == "__main__":
    main()
