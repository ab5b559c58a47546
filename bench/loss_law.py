"""The loss law on real runs of a tiny mixture: fitted on a constant and a cosine run, does it predict WSD, and is the
schedule it finds better than cosine?

    python -m bench.loss_law                        two to three minutes of one core for each of four seeds
    python -m bench.loss_law --seeds 0

Losses are those on the same held-out text, every 20 steps, as they are: no smoothing. The setting (model, batch, peak,
steps) was chosen on seed 0, the others are as they came. What is done is kept in out/loss_law, and a run that was
stopped goes on. Writes bench/results/loss_law.json.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from bench.measure import machine, record
from bench.trained import on_one_core
from moesaic.data.preparation.prepare import prepare
from moesaic.recipe import load_recipe
from moesaic.train.law.fit import fit, score
from moesaic.train.law.optimize import optimize
from moesaic.train.law.runs import HELD_OUT, LOSS, read_run
from moesaic.train.pretrain import pretrain

STEPS, WARMUP, PEAK = 1200, 60, 0.002
BRANCH = 960  # until here WSD is the constant run, to the bit, and goes on from its checkpoint
# Short documents, shuffled: with whole files, whose tables fill many batches in a row, the curve is no curve.
RECIPE = rf"""
model: {{vocab: 512, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 64, experts: 4,
        expert_hidden: 32, shared_experts: 0, context: 64, tied: true}}
data:
  sources:
    - {{name: code, path: "builtin:stdlib", separator: "\n\n"}}
  sequence_length: 64
  tokenizer_sample: 2000000
  quality: null
  held_out: 0.02
train: {{steps: {STEPS}, batch_tokens: 384, warmup_steps: {WARMUP}, save_every: 240, keep_every: {BRANCH},
        evaluate_every: 20, evaluate_tokens: 4096}}
optimizer: {{name: adamw, lr: {PEAK}}}
"""
SCHEDULES = {
    "constant": "constant",
    "cosine": "{name: cosine, floor: 0.1}",
    "wsd": "{name: wsd, decay: 0.2, floor: 0.1}",
}


def final(run: Path) -> float:
    """The held-out loss after the last step."""
    return float(read_run(run, HELD_OUT).losses[-1])


def compare(fitted_on: list[Path], other: Path, key: str) -> dict[str, Any]:
    fitted = fit([read_run(run, key) for run in fitted_on])
    held = score(fitted.law, read_run(other, key))
    return {
        "final": held.final,
        "predicted": held.predicted_final,
        "final_error": held.final_error,
        "r2": held.r2,
        "fitted_r2": [one.r2 for one in fitted.scores],
        "fit_seconds": fitted.seconds,
        "warnings": list(fitted.warnings),
    }


def train(name: str, schedule: str, seed: int, out: Path) -> Path:
    run = out / f"{name}-{seed}"
    if name == "wsd" and not run.exists():
        _branch(out / f"constant-{seed}", run)
    options = [f"train.seed={seed}", f"data.seed={seed}", f"train.data={out / 'data'}", f"schedule={schedule}"]
    if pretrain(load_recipe(out / "recipe.yaml", options), run, quiet=True)["outcome"] != "finished":
        raise SystemExit("stopped; the same command goes on")
    return run


def one_seed(seed: int, out: Path) -> dict[str, Any]:
    runs = {name: train(name, schedule, seed, out) for name, schedule in SCHEDULES.items()}
    known = [runs["constant"], runs["cosine"]]
    law = fit([read_run(run, HELD_OUT) for run in known]).law
    best = optimize(law, STEPS, PEAK, WARMUP)
    schedule = out / f"schedule-{seed}.json"
    if not schedule.exists():  # a run that was stopped goes on with the schedule it began with
        best.save(schedule)
    runs["optimised"] = train("optimised", f"{{name: from_file, path: {schedule}}}", seed, out)
    return {
        "seed": seed,
        "steps": STEPS,
        "held_out": compare(known, runs["wsd"], HELD_OUT),
        "batches": compare(known, runs["wsd"], LOSS),
        "finals": {name: final(run) for name, run in runs.items()},
        "optimised_predicted": best.final,
    }


def _branch(source: Path, run: Path) -> None:
    """A run that has come as far as another had at BRANCH."""
    place = Path("checkpoints") / f"step-{BRANCH:08}"
    fresh = run.with_name(f".{run.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source / place, fresh / place)
    shutil.copy2(source / "metrics.jsonl", fresh)  # what comes after is dropped when it goes on
    fresh.rename(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--only", choices=SCHEDULES, help="train only this run of each seed, beside another process")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/loss_law"))
    arguments = parser.parse_args()
    on_one_core(arguments.core)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    file = out / "recipe.yaml"
    file.write_text(RECIPE)
    if not (out / "data" / "manifest.json").exists():
        prepare(load_recipe(file), out / "data")

    if arguments.only:
        for seed in arguments.seeds:
            train(arguments.only, SCHEDULES[arguments.only], seed, out)
        return
    rows = []
    print("seed  WSD: true, predicted, off, R²            held-out loss at the end")
    for seed in arguments.seeds:
        row = one_seed(seed, out)
        rows.append(row)
        told, ends = row["held_out"], row["finals"]
        print(
            f"{seed:4}  {told['final']:.4f}  {told['predicted']:.4f}  {told['final_error']:+.2%}  {told['r2']:.4f}     "
            + "  ".join(f"{name} {loss:.4f}" for name, loss in ends.items()),
            flush=True,
        )
    if len(rows) > 1:
        record("loss_law", rows)
    print(machine())


if __name__ == "__main__":
    main()
