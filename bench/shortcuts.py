"""Cheaper steps beside the plain run: random-LTD, progressive layer dropping, sequence-length warm-up.

    python -m bench.shortcuts                       about half a minute of one core for each of 5 variants and 3 seeds
    python -m bench.shortcuts --seeds 0 --only plain token_drop

The same model, data, steps and seeds; quality is the loss on held-out text, time the CPU seconds of the training loop
on one thread. What is done is kept in out/shortcuts, so that it may be stopped. Writes bench/results/shortcuts.json.
"""

from __future__ import annotations

from collections import defaultdict

from bench.measure import machine, record
from bench.trained import Result, against_plain, bench_arguments, table, trained
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.kernels import hardware
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.held_out_loss import HeldOutLoss

RECIPE = r"""
model: {vocab: 1024, hidden: 64, layers: 6, heads: 4, kv_heads: 2, head_size: 16, dense_hidden: 128, experts: 4,
        expert_hidden: 64, shared_experts: 0, context: 256, tied: true}
data:
  sources:
    - {name: code, path: "builtin:stdlib", separator: "\n\n\n"}
  sequence_length: 256
  tokenizer_sample: 2000000
  quality: null
  held_out: 0.03
train: {steps: 250, batch_tokens: 768, warmup_steps: 15, save_every: 100000}
optimizer: {name: adamw, lr: 0.003}
schedule: {name: cosine, floor: 0.1}
"""
STEPS = 250
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "token_drop": ["train.token_drop={start: 0.5, share: 0.7}"],
    "layer_drop": [f"train.layer_drop={{floor: 0.5, gamma: {100 / STEPS}}}"],  # the paper's gamma, 100 / steps
    "length_warmup": [f"data.length_warmup={{steps: {STEPS // 3}, start: 32}}"],
    "length_warmup, fewer tokens": [f"data.length_warmup={{steps: {STEPS // 3}, start: 32, batch: shrink}}"],
}


def main() -> None:
    arguments = bench_arguments(__doc__, VARIANTS, "out/shortcuts")
    out, data = arguments.out, arguments.out / "data"
    file = out / "recipe.yaml"
    file.write_text(RECIPE)
    if not (data / "manifest.json").exists():
        prepare(load_recipe(file), data)
    held_out = HeldOutLoss(Shards(data), tokens=100_000, sequence_length=256, world=World(hardware.device()))

    results: dict[str, dict[int, Result]] = defaultdict(dict)
    for seed in arguments.seeds:
        for name in arguments.only:
            options = [f"train.seed={seed}", f"data.seed={seed}", *VARIANTS[name]]
            folder = out / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
            results[name][seed] = trained(load_recipe(file, options), folder, data, held_out)
            print(name, seed, results[name][seed], flush=True)
    rows = against_plain(results)
    print(table(rows))
    if arguments.only == list(VARIANTS):
        record("shortcuts", rows, steps=STEPS, time="CPU seconds of the training loop on one thread")
    print(machine())


if __name__ == "__main__":
    main()
