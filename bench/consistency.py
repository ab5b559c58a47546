"""How far the cheap proxy of the consistency score agrees with the score.

    python -m bench.consistency                     about a minute of one core for each of two seeds
    python -m bench.consistency --seeds 0

Documents: functions of Python's standard library, and sums in words. The score of each is its expected accuracy under
models that have not seen it; the proxy, the mean probability of its tokens over the checkpoints of one run. Rank
correlations with bootstrap intervals; that of two halves of the models bounds what can be asked of a proxy. Writes
bench/results/consistency.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from bench.measure import machine, record
from moesaic.data.preparation.prepare import prepare
from moesaic.recipe import load_recipe
from moesaic.train.consistency import score_documents

RECIPE = r"""
model: {vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 64, experts: 4,
        expert_hidden: 32, shared_experts: 0, context: 64, tied: true}
data:
  sources:
    - {name: code, path: "builtin:stdlib", separator: "\n\n\n", documents: 500}
    - {name: sums, path: "builtin:sums", documents: 500}
  sequence_length: 64
  tokenizer_sample: 1000000
  quality: null
  held_out: 0.05
train: {steps: 60, batch_tokens: 384, warmup_steps: 5, save_every: 100000}
optimizer: {name: adamw, lr: 0.005}
"""
MODELS, STEPS, LENGTH = 4, 60, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("out/consistency"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "recipe.yaml"
    file.write_text(RECIPE)
    prepare(load_recipe(file), given.out / "data")
    rows = []
    for seed in given.seeds:
        begun = time.process_time()
        recipe = load_recipe(file, [f"train.data={given.out / 'data'}", f"train.seed={seed}"])
        found = score_documents(recipe, given.out / f"seed{seed}", models=MODELS, steps=STEPS, max_length=LENGTH)
        rows.append({"seed": seed, "seconds": time.process_time() - begun, **asdict(found)})
        print(seed, found.text(), flush=True)
    record("consistency", rows, models=MODELS, steps=STEPS, tokens=LENGTH, time="processor seconds")
    print(machine())


if __name__ == "__main__":
    main()
