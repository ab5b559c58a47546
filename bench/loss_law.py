"""The loss law on real runs of a tiny mixture: fitted on a constant and a cosine run, does it predict WSD, and is the
schedule it finds better than cosine?

python -m bench.loss_law --steps 1200 --seeds 0 1 2       about seven minutes a run on two cores, four runs a seed

Final losses are on held-out text, so that the noise of the last batches does not decide. Writes
bench/results/loss_law.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.measure import machine, record
from moesaic.data.held_out import held_out_batches
from moesaic.data.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.kernels.cross_entropy import linear_cross_entropy
from moesaic.model.layout import Layout
from moesaic.recipe import load_recipe
from moesaic.train.law_fit import fit, score
from moesaic.train.law_optimize import optimize
from moesaic.train.law_runs import read_run
from moesaic.train.pretrain import pretrain

RECIPE = """
model: {vocab: 1024, hidden: 64, layers: 3, heads: 4, kv_heads: 2, head_size: 16, dense_hidden: 128, experts: 8,
        expert_hidden: 64, context: 128, tied: true}
data:
  sources:
    - {name: code, path: "builtin:stdlib", documents: 200}
    - {name: sums, path: "builtin:arithmetic", documents: 8000}
  sequence_length: 128
  tokenizer_sample: 1000000
  held_out: 0.05
train: {batch_tokens: 4096, warmup_steps: 60, save_every: 100000}
optimizer: {name: adamw, lr: 0.004}
"""


@torch.inference_mode()
def held_out_loss(run: Path, data: Path) -> float:
    model = moesaic.load(run)
    total = count = 0.0
    for batch in held_out_batches(Shards(data), batch_tokens=8192, longest=128, most=200_000):
        hidden_TD = model(batch.tokens_T, Layout(batch.lengths))
        _, losses_T = linear_cross_entropy(hidden_TD, model.output, batch.targets_T, torch.ones(len(batch.tokens_T)))
        total += float(losses_T.sum())
        count += float((batch.targets_T != -100).sum())
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/loss_law"))
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps
    out.mkdir(parents=True, exist_ok=True)
    file = out / "recipe.yaml"
    file.write_text(RECIPE)
    data = out / "data"
    prepare(load_recipe(file), data)

    def train(name: str, schedule: str, seed: int) -> Path:
        run = out / f"{name}-{seed}"
        options = [f"train.steps={steps}", f"train.seed={seed}", f"data.seed={seed}", f"train.data={data}"]
        pretrain(load_recipe(file, [*options, f"schedule={schedule}"]), run, quiet=True)
        return run

    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        runs = {
            "constant": train("constant", "constant", seed),
            "cosine": train("cosine", "{name: cosine, floor: 0.1}", seed),
        }
        fitted = fit([read_run(runs["constant"]), read_run(runs["cosine"])])
        runs["wsd"] = train("wsd", "{name: wsd, decay: 0.2}", seed)
        held = score(fitted.law, read_run(runs["wsd"]))
        best = optimize(fitted.law, steps, 0.004, 60)
        best.save(out / f"schedule-{seed}.json")
        runs["optimised"] = train("optimised", f"{{name: from_file, path: {out}/schedule-{seed}.json}}", seed)
        row = {
            "seed": seed,
            "steps": steps,
            "wsd_final": held.final,
            "wsd_predicted": held.predicted_final,
            "wsd_final_error": held.final_error,
            "wsd_r2": held.r2,
            "fit_seconds": fitted.seconds,
            "warnings": list(fitted.warnings),
            "held_out": {name: held_out_loss(run, data) for name, run in runs.items()},
        }
        rows.append(row)
        print(row, flush=True)
        record("loss_law", rows)
    print(machine())


if __name__ == "__main__":
    main()
