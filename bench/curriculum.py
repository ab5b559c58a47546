"""Curriculum and weight averaging beside the plain run ("How Learning Rate Decay Wastes Your Best Data", Kaiyuan-2B).

    python -m bench.curriculum                      about twenty seconds of one core for each of 5 variants and 3 seeds

Quality that is known: Python source in which a share of the characters, from none to 60 % by document, was replaced at
random, and the share that was not is the quality. The loss is measured on clean source. With this a curriculum has
something to find; on real data it depends on what its scores are worth. Every variant sees as many tokens of the same
documents. What is done is kept in out/curriculum. Writes bench/results/curriculum.json.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

from bench.measure import machine, record
from bench.trained import Result, against_plain, bench_arguments, table, trained
from moesaic.data.preparation.prepare import prepare
from moesaic.data.records import Document
from moesaic.data.shards import Shards
from moesaic.data.sources import open_source
from moesaic.kernels import hardware
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.recipe_sections import SourceSection
from moesaic.train.held_out_loss import HeldOutLoss

RECIPE = r"""
model: {vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 64, experts: 4,
        expert_hidden: 32, shared_experts: 0, context: 64, tied: true}
data:
  sources: [{name: code, path: NOISY, columns: [clean]}]
  sequence_length: 64
  tokenizer: TOKENIZER
  dedupe: {exact: false}
  quality: {name: column, column: clean}
train: {steps: 600, batch_tokens: 384, warmup_steps: 30, save_every: 100000}
optimizer: {name: adamw, lr: 0.003}
"""
CLEAN = r"""
model: {vocab: 512}
data:
  sources: [{name: code, path: CLEAN}]
  tokenizer_sample: 2000000
  quality: null
  held_out: 0.5
"""
COSINE = "schedule={name: cosine, floor: 0.05}"
MODERATE = "schedule={name: moderate, end: 0.33, decay: 0.2}"
AVERAGE = "train.average={kind: simple, share: 0.15, every: 10}"
CURRICULUM = "data.curriculum=multi_domain"
VARIANTS: dict[str, list[str]] = {
    "plain": [COSINE],  # shuffled, decayed
    "curriculum": [COSINE, CURRICULUM],  # best data last, where the rate is almost nothing
    "moderate": [MODERATE],
    "moderate, averaged": [MODERATE, AVERAGE],
    "curriculum, moderate, averaged": [MODERATE, AVERAGE, CURRICULUM],
}
WORST = 0.6  # share of the characters replaced in the worst document
TEST = 0.04  # share of the documents kept clean and apart


def write_corpus(folder: Path) -> tuple[Path, Path]:
    """Documents with a known share of noise, and clean ones that are not among them."""
    noisy, clean = folder / "noisy.jsonl", folder / "clean.jsonl"
    if clean.exists():
        return noisy, clean
    chance = random.Random(0)
    letters = "".join(map(chr, range(32, 127)))
    source = SourceSection(name="code", path="builtin:stdlib", separator="\n\n")
    kept: dict[Path, list[str]] = {noisy: [], clean: []}
    for record_ in open_source(source).records():
        if not isinstance(record_, Document) or len(record_.text) < 40:
            continue
        text = record_.text[:2000]
        if chance.random() < TEST:
            kept[clean].append(json.dumps({"text": text}))
            continue
        share = WORST * chance.random()
        text = "".join(chance.choice(letters) if chance.random() < share else letter for letter in text)
        kept[noisy].append(json.dumps({"text": text, "clean": 1 - share}))
    for path, lines in kept.items():  # the clean one last: it says that both are whole
        path.write_text("\n".join(lines) + "\n")
    return noisy, clean


def main() -> None:
    arguments = bench_arguments(__doc__, VARIANTS, "out/curriculum")
    out = arguments.out
    noisy, clean = write_corpus(out)
    (out / "clean.yaml").write_text(CLEAN.replace("CLEAN", str(clean)))
    if not (out / "clean" / "manifest.json").exists():
        prepare(load_recipe(out / "clean.yaml"), out / "clean")
    file = out / "recipe.yaml"
    file.write_text(RECIPE.replace("NOISY", str(noisy)).replace("TOKENIZER", str(out / "clean" / "tokenizer")))
    if not (out / "data" / "manifest.json").exists():
        prepare(load_recipe(file), out / "data")
    held_out = HeldOutLoss(Shards(out / "clean"), tokens=60_000, sequence_length=64, world=World(hardware.device()))

    results: dict[str, dict[int, Result]] = defaultdict(dict)
    for seed in arguments.seeds:
        for name in arguments.only:
            options = [f"train.seed={seed}", f"data.seed={seed}", *VARIANTS[name]]
            folder = out / f"{name.replace(', ', '-')}-{seed}"
            results[name][seed] = trained(load_recipe(file, options), folder, out / "data", held_out)
            print(name, seed, results[name][seed], flush=True)
    rows = against_plain(results)
    print(table(rows))
    if arguments.only == list(VARIANTS):
        record("curriculum", rows, time="CPU seconds of the training loop on one thread")
    print(machine())


if __name__ == "__main__":
    main()
