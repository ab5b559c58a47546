"""RLHF in three steps as recipes/rlhf.yaml has it: held-out accuracy after SFT and after PPO against the reward model.

    python -m bench.rlhf --seed 0        # some two minutes of one core; resumes
    python -m bench.rlhf --elsewhere 0   # after it: a reward model of right answers against those to other questions
    python -m bench.rlhf --report

From one pretrained model, every stage with the seed. Questions are held out of training, and none of those that the
settings were chosen by.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.align_tiny import OUT as TINY
from bench.align_tiny import curve, timed
from bench.critics import interval
from bench.measure import record
from moesaic.align.accuracy import Accuracy
from moesaic.align.align import align
from moesaic.align.examples import TaskExamples
from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.rollout import generate
from moesaic.recipe import Recipe, load_recipe
from moesaic.serve.core.engine import Engine
from moesaic.train.pretrain import pretrain

OUT = Path("out/rlhf")
RECIPE = "recipes/rlhf.yaml"
FIRST, QUESTIONS, COMPARED = 1000, 512, 128  # held-out questions from this one on; those whose samples are compared


def stages(seed: int) -> list[dict[str, Any]]:
    return [stage | {"seed": seed} for stage in load_recipe(RECIPE).dump()["align"]["stages"]]


def recipe_of(found: list[dict[str, Any]]) -> Recipe:
    return load_recipe(RECIPE, [f"align.stages={json.dumps(found)}"])


def run(seed: int) -> None:
    base = TINY / "0-base"
    timed(base, lambda: pretrain(load_recipe("recipes/tiny.yaml", ["train.seed=0"]), base, quiet=True))
    out, spent = OUT / str(seed), time.process_time()
    align(recipe_of(stages(seed)), base, out, quiet=True)
    spent = time.process_time() - spent
    start, judge = out / "stages/1-sft", out / "stages/2-reward_model"
    found = {
        "seed": seed,
        "seconds": round(spent, 1),
        "reward_model": compared(start, judge),
        "sft": right(start),
        "ppo": right(out),
        "curve": curve(out, "accuracy"),
        "mismatch_max": max(value for _, value in curve(out, "mismatch_max")),
        "tokens": [curve(out, "answer_tokens")[step][1] for step in (0, -1)],
    }
    (OUT / f"{seed}.json").write_text(json.dumps(found))


def run_elsewhere(seed: int) -> None:
    """From the same model, the last two stages with other pairs."""
    start, judge, out = OUT / f"{seed}/stages/1-sft", OUT / f"{seed}-judge", OUT / f"{seed}-elsewhere"
    _, model, policy = stages(seed)
    align(recipe_of([model | {"samples": None, "pairs": 1000}]), start, judge, quiet=True)
    align(recipe_of([policy | {"rewards": [{"name": "model", "path": str(judge)}]}]), start, out, quiet=True)
    found = {"reward_model": compared(start, judge), "ppo": right(out), "curve": curve(out, "accuracy")}
    (OUT / f"{seed}-elsewhere.json").write_text(json.dumps({"seed": seed} | found))


def right(place: Path) -> int:
    """Of the held-out questions."""
    questions = TaskExamples("sums", "test")
    measure = Accuracy([questions[FIRST + number] for number in range(QUESTIONS)], max_tokens=32)
    return round(measure(moesaic.load(place))["accuracy"] * QUESTIONS)


def compared(policy: Path, judge: Path) -> dict[str, int]:
    """Of pairs of the policy's samples of which code knows one to be right: those in which that one is preferred."""
    questions = TaskExamples("sums", "test")
    asked = [questions[FIRST + number] for number in range(COMPARED)]
    rewards = weighted_rewards(({"name": "task"}, {"name": "model", "path": str(judge)}))
    sampling = {"max_tokens": 32, "temperature": 1.0}
    groups = generate(Engine(moesaic.load(policy), seed=0), asked, 4, sampling, rewards, [0] * COMPARED).groups
    found = {"pairs": 0, "right": 0, "worked_pairs": 0, "worked_right": 0}
    for group in groups:
        for good in (one for one in group if one.judged.parts["task"] == 1.0):
            for bad in (one for one in group if one.judged.parts["task"] != 1.0):
                preferred = (good.judged.parts["model"] or 0.0) > (bad.judged.parts["model"] or 0.0)
                found["pairs"] += 1
                found["right"] += preferred
                if "\n" in good.text.strip() and "\n" in bad.text.strip():  # both worked out: their form says nothing
                    found["worked_pairs"] += 1
                    found["worked_right"] += preferred
    return found


def report() -> None:
    rows = []
    for file in sorted(OUT.glob("*.json")):
        row = json.loads(file.read_text()) | {"pairs": "elsewhere" if "elsewhere" in file.name else "samples"}
        for name in ("sft", "ppo"):
            if name in row:
                row[f"{name}_95"] = interval(row[name], QUESTIONS)
                row[name] = round(row[name] / QUESTIONS, 3)
        rows.append(row)
        print(row)
    print(record("rlhf", rows, questions=QUESTIONS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--elsewhere", type=int)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.seed is not None:
        run(arguments.seed)
    if arguments.elsewhere is not None:
        run_elsewhere(arguments.elsewhere)
    if arguments.report:
        report()


if __name__ == "__main__":
    main()
