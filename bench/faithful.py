"""Faithful to a context (CANOE): a tiny policy whose long answers have planted hallucinations, before and after
Dual-GRPO, with the proxy reward and without it.

    python -m bench.faithful                      makes the policy first, in some six minutes of one core
    python -m bench.faithful --reader DIR         from a policy that can read (recipes/faithful.yaml, first stage)
    python -m bench.faithful --variants dual --seeds 2         without the ablation; runs that are there count

Held-out questions, each answered greedily and once at temperature 1. `right` is the short answer; `supported` says that
every sentence of the long answer stands in the passage, with those that the answer rests on; `unanswerable` is right on
questions that the passage does not answer. Checked by code; intervals are Wilson's, at 95 %, of all seeds together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import moesaic
from bench.align_tiny import timed
from bench.measure import record
from moesaic import atomic
from moesaic.align.align import align
from moesaic.align.examples import TaskExamples
from moesaic.align.rewards.supported import Supported
from moesaic.align.rewards.task import TaskScore
from moesaic.align.rollouts.rollout import generate
from moesaic.evaluate.interval import wilson
from moesaic.recipe import Recipe, load_recipe
from moesaic.serve.core.engine import Engine
from moesaic.train.pretrain import pretrain

RECIPE = "recipes/faithful.yaml"
FAMILY = "context_qa:facts=5,instructions=false,think=false"
READ = "context_qa:retell=0.6,brief=0.2,facts=5,instructions=false,think=false"
SHAPE = ["model.layers=3", "model.kv_heads=4", "model.head_size=32", "train.seed=0"]
VARIANTS = {"dual": {}, "no_proxy": {"proxy": 0.0}}


def one_stage(number: int, changes: dict[str, Any]) -> Recipe:
    stage = load_recipe(RECIPE).dump()["align"]["stages"][number] | {"evaluate_every": 0} | changes
    return load_recipe(RECIPE, [f"align.stages={json.dumps([stage])}"])


def reader(out: Path) -> Path:
    source = {"name": "qa", "path": f"builtin:reasoning_gym/{READ}", "documents": 8000}
    base = load_recipe("recipes/tiny.yaml", [*SHAPE, f"data.sources={json.dumps([source])}"])
    timed(out / "base", lambda: pretrain(base, out / "base", quiet=True))
    timed(out / "reader", lambda: align(one_stage(0, {}), out / "base", out / "reader", quiet=True))
    return out / "reader"


def measured(model: Path, questions: int) -> dict[str, list[float]]:
    """Of every held-out question; those at temperature 1 begin with `drawn_`."""
    file = model.with_suffix(f".{questions}.json")
    if file.exists():
        kept: dict[str, list[float]] = json.loads(file.read_text())
        return kept
    examples = TaskExamples(FAMILY, "test")
    asked = [examples[1000 + number] for number in range(questions)]  # not those that runs were watched on
    found: dict[str, list[float]] = {}
    for prefix, temperature in (("", 0.0), ("drawn_", 1.0)):
        engine = Engine(moesaic.load(model), max_requests=64, seed=0)
        rewards = [
            ("right", 1.0, TaskScore()),
            ("supported", 1.0, Supported()),
            ("said", 1.0, Supported(complete=False)),
        ]
        sampling = {"max_tokens": 48, "temperature": temperature}
        rollouts = generate(engine, asked, 1, sampling, rewards, list(range(questions)))
        for example, (sample,) in zip(asked, rollouts.groups, strict=True):
            assert example.task is not None
            parts = {name: part or 0.0 for name, part in sample.judged.parts.items()}
            found.setdefault(f"{prefix}right", []).append(parts["right"])
            found.setdefault(f"{prefix}supported", []).append(parts["supported"])
            found.setdefault(f"{prefix}hallucinated", []).append(1.0 - parts["said"])
            kind = example.task.metadata["kind"]
            found.setdefault(f"{prefix}right_{kind}", []).append(parts["right"])
            found.setdefault(f"{prefix}supported_{kind}", []).append(parts["supported"])
    atomic.write_json(file, found)
    return found


def row(name: str, runs: list[dict[str, list[float]]], **facts: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"variant": name, **facts}
    for key in runs[0]:
        values = [value for run in runs for value in run[key]]
        low, high = wilson(sum(values), len(values))
        line[key] = [round(number, 3) for number in (sum(values) / len(values), low, high)]
    line["supported_by_seed"] = [round(sum(run["drawn_supported"]) / len(run["drawn_supported"]), 3) for run in runs]
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/faithful"))
    parser.add_argument("--reader", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--planted-steps", type=int, default=200)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    start = out / "planted"
    learnt = given.reader or reader(out)
    timed(start, lambda: align(one_stage(1, {"steps": given.planted_steps}), learnt, start, quiet=True))
    rows = [row("planted", [measured(start, given.questions)])]
    print(json.dumps(rows[-1]), flush=True)
    for name in given.variants.split(","):
        runs, seconds = [], []
        for seed in range(given.seeds):
            reward = {"name": "faithfulness", "tags": ["long_answer", "answer"], **VARIANTS[name]}
            rewards = [reward, {"name": "supported", "weight": 0.0}]
            recipe = one_stage(2, {"steps": given.steps, "seed": seed, "rewards": rewards})
            place = out / f"{name}-{seed}"
            seconds.append(timed(place, lambda recipe=recipe, place=place: align(recipe, start, place, quiet=True)))
            runs.append(measured(place, given.questions))
        rows.append(row(name, runs, seeds=given.seeds, steps=given.steps, seconds=[round(s) for s in seconds]))
        print(json.dumps(rows[-1]), flush=True)
    if not given.no_record:
        print(record("faithful", rows, questions=given.questions))


if __name__ == "__main__":
    main()
