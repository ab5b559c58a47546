"""Slides laid out by a tiny model (AeSlides, recipes/slides.yaml): held-out slides as a real browser shows them, before
GRPO on what can be measured of a layout and after it. Wants a Chromium.

    python -m bench.slides                  a quarter of an hour of a core
    python -m bench.slides --seeds 0        ten minutes

`seen` is the share of what was asked for that can be seen, `pairs` the pairs of boxes that lie on each other, a slide;
`whole` the share of slides on which all can be seen, `free` of those on which nothing lies on anything, and `clean` of
both, with Wilson's intervals at 95 % of all seeds together. `aspect`, `whitespace` and `balance` are the means of the
rewards' metrics, without their factor of what can be seen. Greedy, and drawn at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import moesaic
from bench.align_tiny import curve, timed
from bench.measure import record
from moesaic import atomic
from moesaic.align.align import align
from moesaic.align.examples import TaskExamples
from moesaic.align.rewards.slides import slide_of, wanted_of
from moesaic.align.rollouts.rollout import generate
from moesaic.evaluate.interval import wilson
from moesaic.recipe import Recipe, load_recipe
from moesaic.serve.core.engine import Engine
from moesaic.train.pretrain import pretrain
from moesaic.worlds.slides.layout import Layout
from moesaic.worlds.slides.rendering import layouts

RECIPE = "recipes/slides.yaml"
SHAPE = ["model.layers=3", "model.kv_heads=4", "model.head_size=32", "train.seed=0"]
FIRST = 1_000  # of the held-out slides that are measured here: not those that runs were watched on


def one_stage(number: int, **changes: Any) -> Recipe:
    stage = load_recipe(RECIPE).dump()["align"]["stages"][number] | {"evaluate_every": 0} | changes
    return load_recipe(RECIPE, [f"align.stages={json.dumps([stage])}"])


def start_model(out: Path, steps: int) -> Path:
    source = {"name": "slides", "path": "builtin:reasoning_gym/slides:crowded=0.6", "documents": 8000}
    base = load_recipe("recipes/tiny.yaml", [*SHAPE, f"data.sources={json.dumps([source])}"])
    timed(out / "base", lambda: pretrain(base, out / "base", quiet=True))
    timed(out / "start", lambda: align(one_stage(0, steps=steps), out / "base", out / "start", quiet=True))
    return out / "start"


def measured(model: Path, slides: int) -> dict[str, list[float]]:
    file = model.with_suffix(f".{slides}.json")
    if not file.exists():
        examples = TaskExamples("slides", "test")
        asked = [examples[FIRST + number] for number in range(slides)]
        found: dict[str, list[float]] = {}
        for prefix, temperature in (("", 0.0), ("drawn_", 1.0)):
            engine = Engine(moesaic.load(model, threads=1), max_requests=64, seed=0)
            sampling = {"max_tokens": 160, "temperature": temperature}
            groups = generate(engine, asked, 1, sampling, (), list(range(slides))).groups
            shown = layouts([slide_of(sample.text) for (sample,) in groups])
            for example, layout in zip(asked, shown, strict=True):
                wanted = wanted_of(example)
                assert wanted is not None
                for name, value in seen(layout if isinstance(layout, Layout) else Layout(()), wanted).items():
                    found.setdefault(prefix + name, []).append(value)
        atomic.write_json(file, found)
    values: dict[str, list[float]] = json.loads(file.read_text())
    return values


def seen(layout: Layout, wanted: Any) -> dict[str, float]:
    content = layout.content(wanted)
    values = {"seen": content, "pairs": float(layout.colliding), "whole": float(content == 1)}
    values |= {"free": float(not layout.colliding), "clean": float(content == 1 and not layout.colliding)}
    return values | {name: float(getattr(layout, name)()) for name in ("aspect", "whitespace", "balance")}


def row(name: str, runs: list[dict[str, list[float]]], **facts: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"row": name, **facts}
    for key in runs[0]:
        values = [value for run in runs for value in run[key]]
        line[key] = round(sum(values) / len(values), 3)
        if key.endswith(("whole", "clean", "free")):
            line[f"{key}_interval"] = [round(bound, 3) for bound in wilson(sum(values), len(values))]
        line[f"{key}_by_seed"] = [round(sum(run[key]) / len(run[key]), 3) for run in runs]
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--slides", type=int, default=128, help="held out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of GRPO; the start is one")
    parser.add_argument("--out", type=Path, default=Path("out/slides"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    start = start_model(out, given.sft_steps)
    rows = [row("start", [measured(start, given.slides)])]
    runs, seconds, curves = [], [], []
    for seed in given.seeds:
        place, recipe = out / f"grpo-{seed}", one_stage(1, steps=given.steps, seed=seed)
        seconds.append(timed(place, lambda recipe=recipe, place=place: align(recipe, start, place, quiet=True)))
        curves.append(curve(place, "reward/slides.collisions"))
        runs.append(measured(place, given.slides))
    rows.append(row("grpo", runs, seeds=given.seeds, seconds=[round(s) for s in seconds], collisions=curves))
    if not given.no_record:
        record("slides", rows, slides=given.slides, steps=given.steps, sft_steps=given.sft_steps)


if __name__ == "__main__":
    main()
