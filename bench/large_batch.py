"""Large batches: ScaLA's noise when a model is adapted, and length warm-up where a run from scratch is unstable.

    python -m bench.large_batch                     a few seconds of one core for each of 8 variants and each seed

Adapting: a model of code is trained on to prose, over as many tokens in 96 small steps or in 12 large ones, with noise
against it or without; what counts is the loss on held-out prose. From scratch: large steps at a large learning rate;
how far a loss rises above the best so far is the instability ("The Stability-Efficiency Dilemma"). Writes
bench/results/large_batch.json.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import moesaic
from bench.continual import prepared
from bench.measure import machine, record
from bench.trained import bench_arguments
from moesaic.data.shards import Shards
from moesaic.kernels import hardware
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.loop import train
from moesaic.train.run import Run

PROSE = "data.phases=[{share: 1.0, weights: {prose: 1.0}}]"
CODE = "data.phases=[{share: 1.0, weights: {code: 1.0}}]"
LARGE = ["train.steps=12", "train.batch_tokens=4096", "train.warmup_steps=2", "schedule=linear"]
NOISE = "train.adversarial={size: 0.05, delay: 0.25, every: 1}"
STEEP = [
    "train.steps=40",
    "train.batch_tokens=4096",
    "train.warmup_steps=0",
    "optimizer.lr=0.03",
    "train.spike.sigmas=0",
]
STEEP += ["model.context=256", "data.sequence_length=256", "train.clip=1000.0", CODE]
WARMUP = "data.length_warmup={{steps: 20, start: 16, batch: {}}}"
VARIANTS: dict[str, list[str]] = {
    "adapted: small batch": [PROSE, "train.steps=96", "optimizer.lr=0.002", "train.warmup_steps=4", "schedule=linear"],
    "adapted: large batch": [PROSE, *LARGE, "optimizer.lr=0.006"],
    "adapted: large batch, noise": [PROSE, *LARGE, "optimizer.lr=0.006", NOISE],
    "adapted: large batch, lr x2": [PROSE, *LARGE, "optimizer.lr=0.012"],
    "adapted: large batch, lr x2, noise": [PROSE, *LARGE, "optimizer.lr=0.012", NOISE],
    "from scratch: plain": STEEP,
    "from scratch: length warm-up": [*STEEP, WARMUP.format("same")],
    "from scratch: length warm-up, fewer tokens": [*STEEP, WARMUP.format("shrink"), f"train.tokens={40 * 4096}"],
}


def run_one(file: Path, data: Path, folder: Path, options: list[str], source: str) -> dict[str, Any]:
    kept = folder / "bench.json"
    if kept.is_file():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    recipe = load_recipe(file, options)
    run = Run(recipe, folder, data, quiet=True)
    run.plots = False
    began = time.process_time()
    train(run)
    seconds = time.process_time() - began
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rises = [loss - min(losses[: n + 1]) for n, loss in enumerate(losses)]
    length, world = recipe.data.sequence_length, World(hardware.device())
    held_out = HeldOutLoss(Shards(data), tokens=16_000, sequence_length=length, world=world, source=source)
    result = {"loss": float(held_out(moesaic.load(folder))), "rise": max(rises), "seconds": seconds}
    kept.write_text(json.dumps(result))
    return result


def main() -> None:
    arguments = bench_arguments(__doc__, VARIANTS, "out/large-batch-bench")
    file, data = prepared(arguments.out)
    run_one(file, data, arguments.out / "base", [CODE], "code")
    rows = []
    for name in arguments.only:
        adapts = name.startswith("adapted")
        found = []
        for seed in arguments.seeds:
            options = [*VARIANTS[name], f"train.seed={seed}", f"data.seed={seed}"]
            options += [f"train.init={arguments.out / 'base'}"] if adapts else []
            folder = arguments.out / f"{list(VARIANTS).index(name)}-{seed}"
            found.append(run_one(file, data, folder, options, "prose" if adapts else "code"))
        losses = [one["loss"] for one in found]
        rows.append(
            {
                "variant": name,
                "seeds": arguments.seeds,
                "loss": statistics.mean(losses),
                "losses": losses,
                "rise": statistics.mean(one["rise"] for one in found),
                "seconds": statistics.mean(one["seconds"] for one in found),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    record("large_batch", rows, time="CPU seconds of the training loop; the machine was busy")
    print(machine())


if __name__ == "__main__":
    main()
