"""Forms of a model beside the plain one: PR-MoE, both-ways blank infilling, DeepNorm at depth.

    python -m bench.forms                              about three minutes of one core
    python -m bench.forms --only infilling --seeds 0   one of them, with one seed

The same text (Python's standard library), steps and seeds within each; quality is the loss on held-out text, for blank
infilling that of held-out blanks. What is done is kept in out/forms. Writes bench/results/forms.json, and of some of
them bench/results/forms-depth.json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bench.measure import machine, record
from bench.trained import Result, bench_arguments, trained
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.kernels import hardware
from moesaic.methods import build
from moesaic.model.context import Routing
from moesaic.model.facts import facts
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import Recipe, load_recipe
from moesaic.train.architecture import architecture
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.objectives import Objective

RECIPE = r"""
model: {family: moesaic, vocab: 512, hidden: 48, layers: 4, heads: 3, kv_heads: 3, head_size: 16, dense_layers: 0,
        experts: 8, experts_per_token: 2, expert_hidden: 48, shared_experts: 0, context: 128, tied: true,
        router: {score: softmax}}
data:
  sources:
    - {name: code, path: "builtin:stdlib", separator: "\n\n\n", documents: 4000}
  sequence_length: 64
  tokenizer_sample: 300000
  quality: null
  held_out: 0.03
train: {steps: 100, batch_tokens: 1024, warmup_steps: 15, save_every: 100000, spike: {sigmas: 0}}
optimizer: {name: adamw, lr: 0.004}
schedule: {name: cosine, floor: 0.1}
"""
RESIDUAL = [
    "model.residual=true",
    "model.shared_experts=1",
    "model.experts_per_token=1",
    "model.router.normalize=false",
]
DENSE = ["model.dense_layers=4", "model.dense_hidden=144"]
DEEP = ["model.layers=24", "model.dense_layers=24", "model.dense_hidden=96", "model.hidden=32", "model.heads=2",
        "model.kv_heads=2", "train.steps=40", "train.warmup_steps=0"]  # fmt: skip
BLANKS = [*DENSE, "train.objective={name: blank_infilling, share: 0.15}"]
VARIANTS: dict[str, dict[str, list[str]]] = {
    "mixture": {
        "plain, 8 experts, two a token": [],
        "pyramid 2 2 4 8 and residual (PR-MoE)": [*RESIDUAL, "model.experts=[2,2,4,8]"],
        "plain of PR-MoE's size, 5 experts": ["model.experts=5"],
    },
    "infilling": {
        "causal": BLANKS,
        "part A both ways": [*BLANKS, "model.infilling=true"],
    },
    "depth": {
        f"{norm}, rate {rate}": [*DEEP, f"model.norm={norm}", f"optimizer.lr={rate}"]
        for norm in ("pre", "post", "deep")
        for rate in (0.003, 0.01)
    },
}


class HeldOutBlanks:
    """The loss of blanks in held-out text, the same ones for every model."""

    def __init__(self, text: HeldOutLoss, recipe: Recipe) -> None:
        self.batches, self.objective = text.batches, build(recipe.train.objective, Objective, "bench")

    @torch.no_grad()
    def __call__(self, model: Model) -> float:
        self.objective.prepare(model)
        losses = [float(self.objective(model, batch, Routing()).total) for batch in self.batches]
        return sum(losses) / len(losses)


def main() -> None:
    arguments = bench_arguments(__doc__, VARIANTS, "out/forms")
    out: Path = arguments.out
    file, data = out / "recipe.yaml", out / "data"
    file.write_text(RECIPE)
    if not (data / "manifest.json").exists():
        prepare(load_recipe(file), data)
    text = HeldOutLoss(Shards(data), tokens=40_000, sequence_length=64, world=World(hardware.device()))

    rows: list[Result] = []
    for group in arguments.only:
        for name, given in VARIANTS[group].items():
            found: list[Result] = []
            for seed in arguments.seeds:
                recipe = load_recipe(file, [*given, f"train.seed={seed}", f"data.seed={seed}"])
                measure: Callable[[Model], float] = HeldOutBlanks(text, recipe) if group == "infilling" else text
                found.append(trained(recipe, folder(out, group, name, seed), data, measure))  # type: ignore[arg-type]
                print(group, name, seed, round(found[-1]["loss"], 4), f"{found[-1]['seconds']:.1f} s", flush=True)
            size = facts(architecture(recipe.model, bos=None, eos=(0,), pad=0))
            losses = [one["loss"] for one in found]
            rows.append(
                {
                    "group": group,
                    "variant": name,
                    "parameters": size.parameters,
                    "active": size.active_parameters,
                    "loss": sum(losses) / len(losses),
                    "losses": losses,
                    "seconds": sum(one["seconds"] for one in found) / len(found),
                }
            )
    for row in rows:
        print(
            f"{row['group']:10} {row['variant']:40} {row['parameters']:9,} {row['loss']:8.4f} {row['seconds']:6.1f} s"
        )
    time = "CPU seconds of the training loop on one thread"
    some = [] if list(arguments.only) == list(VARIANTS) else arguments.only
    record("-".join(["forms", *some]), rows, seeds=arguments.seeds, groups=arguments.only, time=time)
    print(machine())


def folder(out: Path, group: str, name: str, seed: int) -> Path:
    return out / f"{group}-{name.replace(', ', '-').replace(' ', '_').replace('(', '').replace(')', '')}-{seed}"


if __name__ == "__main__":
    main()
