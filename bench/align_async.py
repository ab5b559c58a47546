"""A policy run with rollouts in the trainer, and with a worker beside it: time, staleness, and what was learned.

    python -m bench.align_async                  # a few minutes on two cores
    python -m bench.align_async --steps 20

All runs have the same model (recipes/tiny.yaml after SFT), prompts and number of steps; each has the whole
machine. The time is from the second step on, so that starting Ray and the worker, some seconds, is not in it. On two
cores the trainer and a worker have one each, where without a worker either has both in turn: what is won is what two
threads waste on small matrices.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from pathlib import Path

import torch

from bench.align_tiny import sft_model
from bench.measure import record
from moesaic.align.accuracy import Accuracy
from moesaic.align.align import begin
from moesaic.align.stages import Stage
from moesaic.kernels import hardware
from moesaic.recipe import load_recipe
from moesaic.train.loop import train

MODES = {
    "in the trainer": "",
    "staleness 0": "asynchronous: {staleness: 0},",
    "staleness 1": "asynchronous: {staleness: 1},",
    "staleness 1, finish": "asynchronous: {staleness: 1, on_update: finish},",
    "staleness 2": "asynchronous: {staleness: 2},",
}


def one(folder: Path, model: Path, mode: str, steps: int, seed: int) -> dict[str, float | str]:
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    file = folder / "recipe.yaml"
    file.write_text(
        f"""
align:
  stages:
    - {{name: policy, steps: {steps}, lr: 0.001, seed: {seed}, prompts: 16, group: 8, max_tokens: 32, save_every: 1000,
        evaluate_every: {steps}, rewards: [{{name: task}}], objective: {{clip_high: 0.28}}, {MODES[mode]}
        data: [{{path: "builtin:sums"}}]}}
optimizer: {{name: muon, lr: 0.001, weight_decay: 0.0}}
schedule: constant
"""
    )
    recipe = load_recipe(file, [])
    run = begin(recipe, recipe.build("align.stages.0", Stage), "policy", model, out, quiet=True)
    run.plots, run.measure = False, Accuracy.of([{"path": "builtin:sums"}], 256, 32)
    train(run)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    later = lines[1:]
    return {
        "mode": mode,
        "seconds_per_step": statistics.mean(line["seconds"] for line in later),
        "accuracy": lines[-1]["accuracy"],
        "reward": statistics.mean(line["reward"] for line in lines[-10:]),
        "staleness_max": max(line["staleness_max"] for line in lines),
        "staleness_mean": statistics.mean(line.get("staleness_mean", 0.0) for line in later),
        "trainer_waited": statistics.mean(line.get("trainer_waited", 0.0) for line in later),
        "workers_waited": statistics.mean(line.get("workers_waited", 0.0) for line in later),
        "dropped": sum(line.get("dropped", 0.0) for line in lines),
        "mismatch_max": max(line["mismatch_max"] for line in lines),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--modes", nargs="+", default=list(MODES))
    options.add_argument("--folder", type=Path, default=Path("out/align_async"))
    asked = options.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model, _ = sft_model(asked.seed)
    load = os.getloadavg()[0]  # above 1, others were at work and the times are worth little
    rows = [one(folder, model, mode, asked.steps, asked.seed) for mode in asked.modes]
    for row in rows:
        row["ratio"] = float(rows[0]["seconds_per_step"]) / float(row["seconds_per_step"])
        print(
            f"{row['mode']:20} {row['seconds_per_step']:.3f} s a step ({row['ratio']:.2f}x)"
            f"  accuracy {row['accuracy']:.3f}  staleness {row['staleness_mean']:.2f} (most {row['staleness_max']:.0f})"
            f"  waited: trainer {row['trainer_waited']:.3f} s, worker {row['workers_waited']:.3f} s"
            f"  dropped {row['dropped']:.0f}"
        )
    torch.set_num_threads(hardware.threads())  # a run beside a worker leaves fewer
    print(record("align_async", rows, steps=asked.steps, seed=asked.seed, load_before=load))


if __name__ == "__main__":
    main()
