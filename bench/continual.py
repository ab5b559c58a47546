"""Three domains of text in turn: forgetting and gain, with an episodic memory, without one, and as one mixture.

    python -m bench.continual                       about ten seconds of one core for each of 5 variants and 3 seeds

Code is Python's standard library, prose the texts of its help pages, sums are made. Every run sees as many new tokens
of each; a memory replays some more, which its CPU seconds say. A loss is on held-out text of a domain at the end of the
run; forgetting is how much higher it is than right after the domain was learned. Writes bench/results/continual.json.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped,unused-ignore]
from typing import Any

from bench.measure import machine, record
from bench.trained import bench_arguments
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.kernels import hardware
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.loop import train
from moesaic.train.run import Run

DOMAINS = ("code", "prose", "sums")
STEPS = 240
RECIPE = r"""
model: {vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 64, experts: 4,
        expert_hidden: 32, shared_experts: 0, context: 64, tied: true}
data:
  sources:
    - {name: code, path: "builtin:stdlib", documents: 40}
    - {name: prose, path: PROSE, separator: "\n\n\n"}
    - {name: sums, path: "builtin:sums", documents: 3000}
  sequence_length: 64
  tokenizer_sample: 300000
  quality: null
  held_out: 0.1
train: {steps: 240, batch_tokens: 512, warmup_steps: 12, save_every: 100000}
optimizer: {name: adamw, lr: 0.004}
"""
THIRD = 1 / 3
IN_TURN = "data.phases=[" + ", ".join(f"{{share: {THIRD!r}, weights: {{{name}: 1.0}}}}" for name in DOMAINS) + "]"
VARIANTS: dict[str, list[str]] = {
    "as one mixture": [],
    "in turn": [IN_TURN],
    "in turn, 32 in RAM": [IN_TURN, "train.memory={ram: 32, disk: 0, swap: 0, replay: 0.5}"],
    "in turn, 32 in RAM, 1024 on disk": [IN_TURN, "train.memory={ram: 32, disk: 1024, swap: 4, replay: 0.5}"],
    "the same, half of the replay": [IN_TURN, "train.memory={ram: 32, disk: 1024, swap: 4, replay: 0.25}"],
}


class Watched(Run):
    """A run that measures every domain where one ends."""

    def log_step(self, *given: Any) -> None:
        super().log_step(*given)
        if self.step % (STEPS // 3) == 0:
            began = time.process_time()
            self.found.append(self.measured(self.model))
            self.apart += time.process_time() - began


def prepared(out: Path) -> tuple[Path, Path]:
    """The recipe's file, and its data."""
    prose, file = out / "prose.txt", out / "recipe.yaml"
    prose.write_text("\n\n\n".join(topics[name] for name in sorted(topics)))
    file.write_text(RECIPE.replace("PROSE", str(prose)))
    if not (out / "data/manifest.json").exists():
        prepare(load_recipe(file), out / "data")
    return file, out / "data"


def run_one(file: Path, data: Path, folder: Path, options: list[str]) -> dict[str, Any]:
    kept = folder / "bench.json"
    if kept.is_file():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    shutil.rmtree(folder, ignore_errors=True)
    world = World(hardware.device())
    measures = [
        HeldOutLoss(Shards(data), tokens=8000, sequence_length=64, world=world, source=name) for name in DOMAINS
    ]

    def measured(model: Model) -> list[float]:
        return [float(one(model)) for one in measures]

    run = Watched(load_recipe(file, options), folder, data, quiet=True)
    run.plots, run.measured, run.found, run.apart = False, measured, [], 0.0  # type: ignore[attr-defined]
    began = time.process_time()
    train(run)
    seconds = time.process_time() - began - run.apart  # type: ignore[attr-defined]
    journals = {
        name: [json.loads(line) for line in (folder / name).open()] for name in ("metrics.jsonl", "events.jsonl")
    }
    result = {
        "losses": run.found,  # type: ignore[attr-defined]
        "seconds": seconds,
        "replayed": sum(line.get("replayed", 0) for line in journals["metrics.jsonl"]),
        "choices": [event for event in journals["events.jsonl"] if event["kind"] == "replay"],
    }
    kept.write_text(json.dumps(result))
    return result


def main() -> None:
    arguments = bench_arguments(__doc__, VARIANTS, "out/continual-bench")
    file, data = prepared(arguments.out)
    rows = []
    for name in arguments.only:
        found = []
        for seed in arguments.seeds:
            folder = arguments.out / f"{list(VARIANTS).index(name)}-{seed}"
            options = [*VARIANTS[name], f"train.seed={seed}", f"data.seed={seed}"]
            found.append(run_one(file, data, folder, options))
        last = [one["losses"][-1] for one in found]
        forgotten = [[one["losses"][-1][n] - one["losses"][n][n] for n in range(2)] for one in found]
        means = [sum(losses) / 3 for losses in last]
        rows.append(
            {
                "variant": name,
                "seeds": arguments.seeds,
                **{domain: statistics.mean(losses[n] for losses in last) for n, domain in enumerate(DOMAINS)},
                "mean": statistics.mean(means),
                "means": means,
                "forgetting": statistics.mean(sum(one) / 2 for one in forgotten),
                "seconds": statistics.mean(one["seconds"] for one in found),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    record("continual", rows, steps=STEPS, time="CPU seconds of the training loop; the machine was busy")
    print(machine())


if __name__ == "__main__":
    main()
