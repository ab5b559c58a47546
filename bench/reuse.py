"""What repeated text is worth, on real pilots: a small language model of Python source (moesaic law reuse).

    python -m bench.reuse                     about three minutes of one core; what is done is kept in out/reuse

Runs of one model over N unique tokens for K epochs, each with its own cosine schedule; the loss is on held-out source.
The law is fitted to the pilots and asked for runs it has not seen (the largest N and K), beside three other answers:
repeated data is as good as fresh, repetition adds nothing, and the curve borrowed from the literature, each with the
one-pass curve that fits it best. Writes bench/results/reuse.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from bench.measure import machine, record
from bench.trained import on_one_core
from moesaic.data.preparation.prepare import prepare
from moesaic.data.reuse import BORROWED, ReuseLaw
from moesaic.data.shards import MANIFEST
from moesaic.recipe import load_recipe
from moesaic.train.law.reuse import Pilot, fit_one_pass, fit_reuse, read_pilot
from moesaic.train.pretrain import pretrain

RECIPE = """
model: {vocab: 512, hidden: 48, layers: 2, heads: 3, kv_heads: 1, head_size: 16, dense_hidden: 96, experts: 4,
        expert_hidden: 48, shared_experts: 0, context: 64, tied: true}
data: {sources: [{name: code, path: "builtin:stdlib", separator: "\\n\\n"}], sequence_length: 64, held_out: 0.03,
       tokenizer_sample: 1000000}
train: {batch_tokens: 512, save_every: 100000, evaluate_every: 100000, evaluate_tokens: 40000, dtype: float32}
optimizer: {name: adamw, lr: 0.004}
schedule: {name: cosine, floor: 0.05}
"""
PILOTS = [(16, 1), (16, 2), (16, 4), (16, 8), (48, 1), (48, 2), (48, 4), (144, 1)]
UNSEEN = [(16, 16), (144, 2)]  # thousands of tokens, epochs


def answers(pilots: list[Pilot], asked: list[Pilot]) -> list[dict[str, Any]]:
    fitted = fit_reuse(pilots)
    laws = {"fitted": fitted.law, "E = K": ReuseLaw(1e9, 0.0), "E = 1": ReuseLaw(0.0, 0.0), "borrowed": BORROWED}
    rows = []
    for name, law in laws.items():
        once = fit_one_pass(pilots, law)
        told = [once.loss(pilot.tokens * law.effective(pilot.epochs, pilot.tokens)) for pilot in asked]
        errors = [value / pilot.loss - 1 for value, pilot in zip(told, asked)]
        rows.append(
            {
                "law": name,
                "pilots_error": once.error,
                "predicted": told,
                "errors": errors,
                "mean_error": sum(map(abs, errors)) / len(errors),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/reuse"))
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    on_one_core(arguments.core)
    out, began = arguments.out, time.process_time()
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(RECIPE)
    if not (out / "data" / MANIFEST).exists():
        prepare(load_recipe(out / "recipe.yaml"), out / "data")
    found = {}
    for thousands, epochs in [*PILOTS, *UNSEEN]:
        tokens, place = 1000 * thousands, out / f"{thousands}k-{epochs}"
        steps = round(tokens * epochs / 512)
        given = [f"train.data={out / 'data'}", f"data.unique_tokens={tokens}", f"train.steps={steps}"]
        pretrain(load_recipe(out / "recipe.yaml", [*given, f"train.warmup_steps={steps // 20}"]), place, quiet=True)
        found[thousands, epochs] = read_pilot(place)
        print(found[thousands, epochs], flush=True)
    pilots, asked = [found[key] for key in PILOTS], [found[key] for key in UNSEEN]
    fitted = fit_reuse(pilots)
    rows = answers(pilots, asked)
    for row in rows:
        print(row)
    facts = {
        "law": vars(fitted.law),
        "error": fitted.error,
        "others": fitted.others,
        "plateaus": fitted.plateaus,
        "useful_epochs": {pilot.tokens: fitted.law.useful(pilot.tokens) for pilot in pilots},
        "warnings": fitted.warnings,
        "pilots": [vars(pilot) for pilot in pilots],
        "unseen": [vars(pilot) for pilot in asked],
        "seconds": time.process_time() - began,
    }
    print(facts)
    record("reuse", rows, **facts, time="CPU seconds of one thread, on a machine that others used too")
    print(machine())


if __name__ == "__main__":
    main()
