"""Quantile benchmarking, selective repetition, multi-domain curriculum: alone and together, on WikiText and code.

    python -m bench.data_together --text wikitext.txt         a few minutes of one core; kept in out/data_together

Two sources of unlike quality scales: encyclopedic prose (paragraphs of the file) and Python's standard library (its
paragraphs), each scored by compression. First a proxy on every half of either says which trains best; the phases are
what is recommended then. Then runs of as many tokens each, the loss on held-out text of both sources, which count
alike:

    plain                 equal weights, shuffled, cosine
    moderate              the same with a moderate decay and averaged weights (what a curriculum needs)
    quantiles             the weights that the proxies recommend
    repetition            and in the last 30 % only what they recommend to keep, repeated
    curriculum            equal weights, worst to best within each source, moderate decay, averaged weights
    together              repetition and curriculum

Writes bench/results/data_together.json.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from bench.measure import machine, record
from bench.trained import Result, against_plain, on_one_core, table, trained
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import MANIFEST, Shards
from moesaic.json_files import read_json
from moesaic.kernels import hardware
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.quantile_proxies import RESULT, run_proxies

RECIPE = """
model: {vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 64, experts: 4,
        expert_hidden: 32, shared_experts: 0, context: 64, tied: true}
data:
  sources:
    - {name: prose, path: TEXT, separator: "\\n\\n"}
    - {name: code, path: "builtin:stdlib", separator: "\\n\\n", documents: 4000}
  sequence_length: 64
  held_out: 0.1
  tokenizer_sample: 1000000
train: {steps: STEPS, batch_tokens: 512, warmup_steps: 10, save_every: 100000, dtype: float32}
optimizer: {name: adamw, lr: 0.004}
"""
COSINE = ["schedule={name: cosine, floor: 0.05}"]
MODERATE = ["schedule={name: moderate, end: 0.33, decay: 0.2}", "train.average={kind: simple, share: 0.15, every: 10}"]
CURRICULUM = ["data.curriculum=multi_domain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/data_together"))
    arguments = parser.parse_args()
    on_one_core(arguments.core)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    # WikiText has a line for a paragraph.
    paragraphs = [line.strip() for line in arguments.text.read_text().splitlines() if len(line.strip()) > 80]
    (out / "prose.txt").write_text("\n\n".join(paragraphs))
    file = out / "recipe.yaml"
    file.write_text(RECIPE.replace("TEXT", str(out / "prose.txt")).replace("STEPS", str(arguments.steps)))
    if not (out / "data" / MANIFEST).exists():
        prepare(load_recipe(file), out / "data")
    given = [f"train.data={out / 'data'}"]
    if not (out / "quantiles" / RESULT).exists():
        proxies = load_recipe(file, [*given, *COSINE])
        run_proxies(proxies, out / "quantiles", steps=arguments.steps // 3, quantiles=2, tokens=16_000)
    quantiles = read_json(out / "quantiles" / RESULT)
    phases = quantiles["phases"]
    whole = [{"share": 1.0, "weights": phases[0]["weights"]}]
    variants = {
        "plain": COSINE,
        "moderate": MODERATE,
        "quantiles": [*COSINE, f"data.phases={json.dumps(whole)}"],
        "repetition": [*COSINE, f"data.phases={json.dumps(phases)}"],
        "curriculum": [*MODERATE, *CURRICULUM],
        "together": [*MODERATE, *CURRICULUM, f"data.phases={json.dumps(phases)}"],
    }
    shards, world = Shards(out / "data"), World(hardware.device())
    parts = [
        HeldOutLoss(shards, tokens=16_000, sequence_length=64, world=world, source=name) for name in ("prose", "code")
    ]

    def held_out(model: Model) -> float:
        return sum(part(model) for part in parts) / len(parts)

    results: dict[str, dict[int, Result]] = defaultdict(dict)
    for seed in arguments.seeds:
        for name, options in variants.items():
            recipe = load_recipe(file, [*given, f"train.seed={seed}", f"data.seed={seed}", *options])
            results[name][seed] = trained(recipe, out / f"{name}-{seed}", out / "data", held_out)
            print(name, seed, results[name][seed], flush=True)
        rows = against_plain(results)
        print(table(rows), flush=True)
        facts = {"quantiles": quantiles["slices"], "phases": phases, "steps": arguments.steps}
        record("data_together", rows, **facts, time="CPU seconds of the training loop, on a machine that others used")
    print(machine())


if __name__ == "__main__":
    main()
