"""Emergence by loss on the quickstart's sums, at several sizes (docs/pretrain.md; moesaic law emerge).

    python -m bench.emergence                 about seven minutes of one core; what is done is kept in out/emergence

The quickstart's recipe at three widths, 500 steps each on fresh sums and source code; every 25 steps a checkpoint, and
of each the share of 200 held-out sums that it answers rightly, asked as its training text has them, and the loss on
text that no run has seen, in the mixture of the training text (that of single batches is too noisy where scores rise by
0.4 for each 0.1 of loss; both are recorded). Three questions: is there a threshold; do the sizes share it; and can the
step at which the largest model crosses it be predicted from the threshold of the *other* sizes and a loss law of two
short runs of its own. Writes bench/results/emergence.json and docs/pictures/emergence.png.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moesaic
from bench.measure import machine, record
from bench.trained import on_one_core
from moesaic.data.preparation.prepare import prepare
from moesaic.data.records import Document
from moesaic.data.shards import MANIFEST
from moesaic.data.sources import open_source
from moesaic.data.tasks import as_text, tasks
from moesaic.data.tasks.families import PRESETS
from moesaic.evaluate.checkpoints import evaluate_checkpoints
from moesaic.evaluate.evaluate import Evaluation
from moesaic.evaluate.suites.tasks import Tasks
from moesaic.recipe import Recipe, load_recipe
from moesaic.recipe_sections import SourceSection
from moesaic.train.checkpoints import Checkpoints
from moesaic.train.law.coming import coming
from moesaic.train.law.emergence import Emergence, Point, emergence
from moesaic.train.law.fit import fit
from moesaic.train.law.plot_emergence import draw
from moesaic.train.law.runs import read_run, read_runs
from moesaic.train.law.scores import read_points
from moesaic.train.pretrain import pretrain

ROOT = Path(__file__).parents[1]
SIZES = (48, 64, 96)  # hidden
STEPS, EVERY, PILOT = 500, 25, 150
WINDOW = 25  # steps that a checkpoint's loss is the mean of
SOURCES = (
    "data.sources=[{name: code, path: 'builtin:stdlib', documents: 100, weight: 0.15},"
    " {name: sums, path: 'builtin:sums', documents: 50000, weight: 0.85}]"
)
SCHEDULE = "schedule={name: wsd, decay: 0.2}"


def recipe(data: Path, hidden: int, *more: str) -> Recipe:
    sizes = [f"model.hidden={hidden}", f"model.dense_hidden={3 * hidden}", f"model.expert_hidden={hidden}"]
    given = [SOURCES, f"train.data={data}", f"train.steps={STEPS}", SCHEDULE, *sizes, *more]
    return load_recipe(ROOT / "recipes" / "tiny.yaml", given)


def explained(points: list[Point], by: str) -> float:
    """How much of the scores' variance the best rising staircase of the loss, or of the step, explains (R²)."""
    from scipy.optimize import isotonic_regression

    order = sorted(points, key=lambda point: -point.loss if by == "loss" else point.step)
    scores = np.array([point.score for point in order])
    rising = isotonic_regression(scores).x
    return float(1 - ((scores - rising) ** 2).sum() / ((scores - scores.mean()) ** 2).sum())


def losses(points: list[Point]) -> list[float]:
    """Of each checkpoint, in nats a token: other sums than those that are asked, and other source code."""
    sums = [as_text(tasks(PRESETS["sums"][0], "test", number)) for number in range(1000, 1300)]
    source = SourceSection(name="code", path="builtin:stdlib")
    code = [one.text[:600] for one in islice(open_source(source).records(), 100, 140) if isinstance(one, Document)]
    found = []
    for point in points:
        folder = Checkpoints(Path(point.run), 1, 0).path(point.step)
        kept = folder.parent.parent / "losses" / f"{point.step}.json"
        if not kept.exists():
            model = moesaic.load(folder)
            assert model.tokenizer is not None
            means = []
            for texts in (sums, code):
                known = model.logprobs([model.tokenizer.encode(text) for text in texts])
                means.append(-float(torch.cat(known).mean()))
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(means))
        of_sums, of_code = json.loads(kept.read_text())
        found.append(0.85 * of_sums + 0.15 * of_code)
    return found


def row(name: str, found: Emergence) -> dict[str, Any]:
    return {
        "fitted on": name,
        "seen": found.seen,
        "threshold": found.threshold,
        "interval": [found.low, found.high],
        "chance": found.chance,
        "slope": found.slope,
        "power": found.power,
        "criteria": found.criteria,
        "scatter": found.scatter,
        "runs": [vars(run) for run in found.runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/emergence"))
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    on_one_core(arguments.core)
    out, began = arguments.out, time.process_time()
    data = out / "data"
    if not (data / MANIFEST).exists():
        prepare(recipe(data, SIZES[0]), data)
    runs = [out / f"hidden-{hidden}" for hidden in SIZES]
    for hidden, run in zip(SIZES, runs):
        pretrain(recipe(data, hidden, f"train.save_every={EVERY}", f"train.keep_every={EVERY}"), run)
    pilots = [out / f"pilot-{name}" for name in ("constant", "cosine")]
    for name, run in zip(("constant", "cosine"), pilots):
        pretrain(recipe(data, SIZES[-1], f"train.steps={PILOT}", f"schedule={{name: {name}}}"), run)
    suite = Tasks(examples=200, max_tokens=32, plain=True)
    evaluate_checkpoints(Evaluation({"tasks": suite}), runs, lambda what, done, total: None)

    noisy, _ = read_points(runs, window=WINDOW)
    every = [replace(point, loss=loss) for point, loss in zip(noisy, losses(noisy), strict=True)]
    rows = [row("all", emergence(every)), row("all, losses of batches", emergence(noisy))]
    for run in runs:
        mine = [point for point in every if point.run == str(run)]
        rows.append(row(run.name, emergence(mine)))
    smaller = emergence([point for point in every if point.run != str(runs[-1])])
    rows.append(row("the smaller two", smaller))
    fitted = fit(read_runs(pilots, "loss"))
    fitted.save(out / "law.json")
    told = coming(smaller, out / "law.json", "wsd", STEPS)
    largest = [point for point in every if point.run == str(runs[-1])]
    truth = read_run(runs[-1])
    # Where the scores themselves leave chance for good: above what 200 draws of it would show.
    limit = smaller.chance + 2 * (smaller.chance * (1 - smaller.chance) / 200) ** 0.5
    steps = [point.step for point in largest if point.score <= limit]
    crossed = {
        "loss": next((point.step for point in largest if point.loss < smaller.threshold), None),
        "score": next((point.step for point in largest if point.step > max(steps)), None),
    }
    facts = {
        "sizes": SIZES,
        "steps": STEPS,
        "explained_by_loss": explained(every, "loss"),
        "explained_by_step": explained(every, "step"),
        "predicted": {key: value for key, value in told.items() if key != "text"},
        "crossed": crossed,
        "batches_above": float(np.mean([a.loss - b.loss for a, b in zip(noisy, every)][-len(every) // 2 :])),
        "losses_of_batches": [point.loss for point in noisy],
        "final_loss": float(np.nanmean(truth.losses[-WINDOW:])),
        "points": [vars(point) for point in every],
        "seconds": time.process_time() - began,
    }
    for found in rows:
        print({key: value for key, value in found.items() if key != "runs"})
    print({key: value for key, value in facts.items() if key != "points"})
    record("emergence", rows, **facts, time="CPU seconds of one thread, on a machine that others used too")
    draw(ROOT / "docs" / "pictures" / "emergence.png", emergence(every), "share of sums answered rightly")
    print(machine())


if __name__ == "__main__":
    main()
