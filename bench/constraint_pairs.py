"""DPO on pairs of a model's own answers to instructions that code can check: a pair for each constraint beside the best
answer against the worst, from the same prompts.

    python -m bench.constraint_pairs               some six minutes of a core
    python -m bench.constraint_pairs --seeds 0     two

The start is made from nothing by SFT on sentences that keep to what was asked only by chance (bench/stage_tasks.py):
so many words, in lower case, with a full stop. Each arm samples the same number of answers and learns as many steps.
`best` pairs an answer that keeps everything with the worst, `better` one that keeps three quarters, `constraint` is
`by: constraint`. Held-out instructions, checked by code: `all` is the share of answers that keep everything, with
Wilson's interval at 95 % of all seeds together, and `share` that of single constraints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import moesaic
from bench.align_tiny import curve
from bench.measure import record
from bench.stage_tasks import held_out, sentences, write
from bench.worlds_policy import empty_model, trained
from moesaic import atomic
from moesaic.align.rewards.constraints import Constraints
from moesaic.align.rollouts.rollout import generate
from moesaic.evaluate.interval import wilson
from moesaic.serve.core.engine import Engine
from moesaic.worlds.example import Example

ARMS: dict[str, dict[str, Any]] = {"best": {}, "better": {"right": 0.75}, "constraint": {"by": "constraint"}}
REWARDS = [("all", 1.0, Constraints(all_or_nothing=True)), ("share", 0.0, Constraints())]


def start_model(folder: Path, steps: int) -> tuple[Path, float]:
    """Writes sentences of the kind, whatever is asked."""
    if not (folder / "data").exists():
        write(folder / "data", 4_000, 2_000)
    base = empty_model((f"{line['prompt']}\n{line['response']}" for line in sentences(2_000)), folder, 0)
    data = [{"path": str(folder / "data/stages-sentences.jsonl")}]
    sft = {"name": "sft", "steps": steps, "data": data, "batch_tokens": 2048}
    return folder / "start", trained([sft], base, folder / "start", lr=0.005)


def measured(model: Path, questions: int) -> dict[str, list[float]]:
    """Of every held-out instruction; those drawn at temperature 1 begin with `drawn_`."""
    file = model.with_suffix(f".{questions}.json")
    if not file.exists():
        asked = [
            Example(({"role": "user", "content": line["question"]},), facts={"constraints": line["constraints"]})
            for line in held_out(questions)
        ]
        found: dict[str, list[float]] = {}
        for prefix, temperature in (("", 0.0), ("drawn_", 1.0)):
            engine = Engine(moesaic.load(model, threads=1), max_requests=64, seed=0)
            sampling = {"max_tokens": 32, "temperature": temperature}
            groups = generate(engine, asked, 1, sampling, REWARDS, list(range(questions))).groups
            for name, _, _ in REWARDS:
                found[prefix + name] = [sample.judged.parts[name] or 0.0 for (sample,) in groups]
        atomic.write_json(file, found)
    values: dict[str, list[float]] = json.loads(file.read_text())
    return values


def row(name: str, runs: list[dict[str, list[float]]], **facts: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"arm": name, **facts}
    for key in runs[0]:
        values = [value for run in runs for value in run[key]]
        share = sum(values) / len(values)
        line[key] = [round(number, 3) for number in (share, *wilson(sum(values), len(values)))]
        line[f"{key}_by_seed"] = [round(sum(run[key]) / len(run[key]), 3) for run in runs]
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=200, help="of DPO, 32 pairs each")
    parser.add_argument("--lr", type=float, default=0.0005)
    parser.add_argument("--sft", type=float, default=0.3, help="weight of the chosen answer's own loss (RPO)")
    parser.add_argument("--prompts", type=int, default=400, help="of which 8 answers each are compared")
    parser.add_argument("--questions", type=int, default=400, help="held out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the stage; the start is one")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("out/constraint_pairs"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    start, seconds = start_model(given.out, given.sft_steps)
    rows = [row("start", [measured(start, given.questions)], seconds=[round(seconds)])]
    data = [{"path": str(given.out / "data/stages-prompts.jsonl")}]
    samples = {"rewards": [{"name": "constraints"}], "prompts": given.prompts, "group": 8, "max_tokens": 32}
    for arm in given.arms:
        runs, facts = [], {"pairs": [], "seconds": []}  # type: ignore[var-annotated]
        for seed in given.seeds:
            stage = {"name": "preference", "steps": given.steps, "seed": seed, "data": data}
            stage |= {"samples": samples | ARMS[arm], "objective": {"beta": 0.1, "sft": given.sft}}
            place = given.out / f"{arm}-{seed}"
            facts["seconds"].append(round(trained([stage], start, place, lr=given.lr, optimizer="adamw")))
            facts["pairs"].append(round(curve(place, "pairs_made")[0][1]))
            runs.append(measured(place, given.questions))
        rows.append(row(arm, runs, **facts))
    if not given.no_record:
        options = {name: getattr(given, name) for name in ("questions", "steps", "prompts", "lr", "sft")}
        record("constraint_pairs", rows, **options)


if __name__ == "__main__":
    main()
