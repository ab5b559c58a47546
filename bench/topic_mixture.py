"""Choosing the mixture by topic beside choosing it by source (RegMix's regression over small runs).

    python -m bench.topic_mixture                       about four minutes of one core
    python -m bench.topic_mixture --seeds 0

Two sources as crawls are: each holds functions of Python's standard library, its documentation strings and sums in
words, in different proportions, and their names say nothing of it. What is wanted is a model of sums: the loss is
measured on others that no source holds. As many proxies of as many steps choose the weights of the sources, and those
of topics that were found in the same data; then a longer run is trained with each, and with the data as it comes. All
see as many tokens. What is done is kept in out/topic_mixture. Writes bench/results/topic_mixture.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from pathlib import Path
from typing import Any

from bench.measure import machine, record
from moesaic.data.mixture import make_plan
from moesaic.data.preparation.prepare import prepare
from moesaic.data.records import Document
from moesaic.data.sources import open_source
from moesaic.data.stream import TokenStream
from moesaic.recipe import load_recipe
from moesaic.recipe_sections import PhaseSection, SourceSection
from moesaic.train.mixture_proxies import find_mixture
from moesaic.train.proxies import Proxies

RECIPE = r"""
model: {vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 64, experts: 4,
        expert_hidden: 32, shared_experts: 0, context: 64, tied: true}
data:
  sources: [{name: north, path: NORTH}, {name: south, path: SOUTH}]
  sequence_length: 64
  tokenizer_sample: 1000000
  quality: null
  held_out: 0.1
  topics: {topics: 8, iterations: 60, common: 0.5}
train: {steps: 150, batch_tokens: 384, warmup_steps: 10, save_every: 100000}
optimizer: {name: adamw, lr: 0.005}
"""
APART = r"""
model: {vocab: 512}
data: {sources: [{name: wanted, path: WANTED}], tokenizer: TOKENIZER, quality: null, held_out: 0.9}
"""
PROXIES, STEPS = 12, 25
SHARES = {"north": (0.75, 0.15, 0.10), "south": (0.55, 0.20, 0.25)}  # of code, documentation and sums
DOCUMENTS = 1500


def kinds() -> dict[str, list[str]]:
    """Texts of three kinds."""
    code, told = [], []
    source = SourceSection(name="code", path="builtin:stdlib", documents=400)
    for found in open_source(source).records():
        if not isinstance(found, Document):
            continue
        code += [part[:1500] for part in found.text.split("\n\n\n") if len(part) > 200]
        try:
            nodes = [
                node for node in ast.walk(ast.parse(found.text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
        except (SyntaxError, ValueError, RecursionError):
            continue
        told += [text[:1500] for node in nodes if (text := ast.get_docstring(node)) and len(text) > 150]
    sums = SourceSection(name="sums", path="builtin:sums", documents=4 * DOCUMENTS)
    lines = [found.text for found in open_source(sums).records() if isinstance(found, Document)]
    return {"code": code, "told": told, "sums": ["\n".join(lines[n : n + 4]) for n in range(0, len(lines), 4)]}


def write(folder: Path) -> dict[str, Path]:
    files = {name: folder / f"{name}.jsonl" for name in (*SHARES, "wanted")}
    if files["wanted"].exists():
        return files
    texts = kinds()
    for some in texts.values():
        random.Random(0).shuffle(some)
    taken = dict.fromkeys(texts, 0)

    def take(kind: str, count: int) -> list[str]:
        first = taken[kind]
        taken[kind] += count
        return texts[kind][first : first + count]

    made = {
        name: [text for kind, share in zip(texts, shares, strict=True) for text in take(kind, round(share * DOCUMENTS))]
        for name, shares in SHARES.items()
    }
    made["wanted"] = take("sums", 300)
    for name, some in made.items():
        random.Random(1).shuffle(some)
        files[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/topic_mixture"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    text = RECIPE
    for name, path in write(given.out).items():
        text = text.replace(name.upper(), str(path))
    file = given.out / "recipe.yaml"
    file.write_text(text)
    data = given.out / "data"
    prepare(load_recipe(file), data)
    apart = given.out / "apart.yaml"
    apart.write_text(
        APART.replace("WANTED", str(given.out / "wanted.jsonl")).replace("TOKENIZER", str(data / "tokenizer"))
    )
    prepare(load_recipe(apart), given.out / "wanted")
    wanted = str(given.out / "wanted")
    found: dict[str, Any] = {}
    begun = time.process_time()
    for by in ("source", "topic"):
        options = [f"train.data={data}"]
        options += ["data.mix_by=topic"] if by == "topic" else []
        place = given.out / by
        mixture = find_mixture(load_recipe(file, options), place, proxies=PROXIES, steps=STEPS, on=wanted, tokens=4096)
        found[by] = {"mixture": mixture, "seconds": time.process_time() - begun}
        begun = time.process_time()
        print(mixture.text(), flush=True)
    rows = []
    for variant in ("as it comes", "source", "topic"):
        by = "source" if variant == "as it comes" else variant
        mixture = found[by]["mixture"]
        weights = mixture.as_it_comes if variant == "as it comes" else mixture.weights
        options = [f"train.data={data}"] + (["data.mix_by=topic"] if by == "topic" else [])
        recipe = load_recipe(file, options)
        steps = recipe.train.steps
        longer = Proxies(recipe, given.out / "runs", steps=steps, on=wanted, tokens=8192)
        section = longer.section.model_copy(update={"phases": (PhaseSection(share=1.0, weights=weights),)})
        losses = []
        for seed in given.seeds:
            plan = make_plan(
                longer.data, section.model_copy(update={"seed": seed}), tokens=steps * recipe.train.batch_tokens
            )
            stream = TokenStream(
                longer.data, plan, batch_tokens=recipe.train.batch_tokens, sequence_length=section.sequence_length
            )
            losses.append(longer.loss(stream, f"{variant} {seed}", seed))
            print(variant, seed, f"{losses[-1]:.4f}", flush=True)
        row = {"variant": variant, "weights": weights, "losses": losses, "loss": sum(losses) / len(losses)}
        if variant != "as it comes":
            row |= {"rank": mixture.rank, "error": mixture.error, "proxy_seconds": found[by]["seconds"]}
        rows.append(row)
    record("topic_mixture", rows, proxies=PROXIES, proxy_steps=STEPS, steps=150, seeds=given.seeds)
    print(machine())


if __name__ == "__main__":
    main()
