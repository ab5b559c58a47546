"""PR-MoE on one GPU: a pyramid with residual experts beside plain mixtures of three times its size, and of its own.

    python -m bench.gpu_pyramid                     five models, three seeds, one process for each seed (11 minutes)
    python -m bench.gpu_pyramid --models 0 1 2      some of them; those that are done are not trained again
    python -m bench.gpu_pyramid --seeds 0 --steps 100 --hidden 64       a quick look, also without a GPU

The shape is DeepSpeed-MoE's, where 32 and 64 experts in the last two layers stood beside 128 in all: here 8 and 16
beside 32. Text: the Python sources of torch and transformers without near duplicates, each read about once; quality is
the loss on held-out files. What is done is kept in out/pyramid.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from statistics import mean, stdev

import torch
import transformers

from bench.measure import record
from bench.trained import Result, trained
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.kernels import hardware
from moesaic.model.facts import facts
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.architecture import architecture
from moesaic.train.held_out_loss import HeldOutLoss

LENGTH = 512
PLAIN = "32 experts, one a token"
RECIPE = """
model: {{family: moesaic, vocab: 8192, hidden: {hidden}, layers: 12, heads: {heads}, kv_heads: {heads}, head_size: 64,
        dense_layers: 0, experts: 32, experts_per_token: 1, expert_hidden: {hidden}, shared_experts: 0, context: 512,
        tied: true, router: {{score: softmax, normalize: false}}}}
data:
  sources: [{{name: torch, path: "{torch}/**/*.py"}}, {{name: transformers, path: "{transformers}/**/*.py"}}]
  sequence_length: 512
  dedupe: {{near: true}}
  quality: null
  held_out: 0.02
train: {{steps: {steps}, batch_tokens: {batch}, warmup_steps: 50, save_every: 100000, spike: {{sigmas: 0}}}}
optimizer: {{name: adamw, lr: 0.001, weight_decay: 0.05}}
schedule: {{name: cosine, floor: 0.05}}
"""
RESIDUAL = ["model.residual=true", "model.shared_experts=1"]
VARIANTS = {
    PLAIN: [],
    "32 experts, two a token": ["model.experts_per_token=2", "model.router.normalize=true"],
    "PR-MoE: 8 in ten layers, 16 in two, residual": [*RESIDUAL, f"model.experts={[8] * 10 + [16] * 2}"],
    "10 experts, one a token": ["model.experts=10"],
    "10 experts, two a token": ["model.experts=10", "model.experts_per_token=2", "model.router.normalize=true"],
}


def losses_of(seed: int, models: list[int], out: Path) -> list[Result]:
    """The models of a seed, one after the other."""
    text = HeldOutLoss(Shards(out / "data"), tokens=400_000, sequence_length=LENGTH, world=World(hardware.device()))
    found = []
    for number in models:
        name, given = list(VARIANTS.items())[number]
        recipe = load_recipe(out / "recipe.yaml", [*given, f"train.seed={seed}", f"data.seed={seed}"])
        found.append(trained(recipe, out / f"{number}-{seed}", out / "data", text))
        print(seed, name, round(found[-1]["loss"], 4), f"{found[-1]['seconds']:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--models", type=int, nargs="*", default=list(range(len(VARIANTS))), help="by their places")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("out/pyramid"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file, data = options.out / "recipe.yaml", options.out / "data"
    places = {package.__name__: Path(str(package.__file__)).parent for package in (torch, transformers)}
    sizes = {"hidden": options.hidden, "heads": options.hidden // 64, "steps": options.steps, "batch": options.batch}
    file.write_text(RECIPE.format(**sizes, **places))
    if not (data / "manifest.json").exists():
        prepare(load_recipe(file), data)
    if not options.models:
        return

    with multiprocessing.get_context("spawn").Pool(len(options.seeds)) as pool:
        found = pool.starmap(losses_of, [(seed, options.models, options.out) for seed in options.seeds])
    rows: list[Result] = []
    for place, number in enumerate(options.models):
        name, given = list(VARIANTS.items())[number]
        size = facts(architecture(load_recipe(file, given).model, bos=None, eos=(0,), pad=0))
        losses, plain = [of_seed[place]["loss"] for of_seed in found], [of_seed[0]["loss"] for of_seed in found]
        gaps = [loss - base for loss, base in zip(losses, plain)]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
        row = {"model": name, "parameters": size.parameters, "active": size.active_parameters, "loss": mean(losses)}
        rows.append({**row, "losses": losses, "gap": mean(gaps), "gap_error": error})
        print(f"{name:46}{size.parameters:12,}{size.active_parameters:12,}{mean(losses):9.4f}{mean(gaps):+9.4f}")
    tokens = found[0][0]["tokens"]
    record("gpu_pyramid", rows, seeds=options.seeds, tokens=tokens, steps=options.steps, hidden=options.hidden)


if __name__ == "__main__":
    main()
