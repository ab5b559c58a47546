"""What is left of each domain after each of GLM-5's stages, and after the cross-stage distillation at their end.

    python -m bench.align_stages                 three seeds, some two minutes of a core each
    python -m bench.align_stages --seeds 0 --no-record

The recipe is recipes/glm5-stages.yaml with more to show in SFT, from the model of bench/align_tiny.py, which has seen
sums and is right about half the time. Held out: sums
(the share that is right), games of cards against a player with a habit (1 won, 1/2 drawn), and the share of the
constraints of a sentence that hold, all greedy. Without the distillation the recipe ends after `general`; what is
forgotten is the score of a domain then, against that behind its own stage. Runs are kept in out/align_stages: a stopped
bench goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import moesaic
from bench.align_tiny import sft_model, timed
from bench.measure import record
from bench.stage_tasks import held_out, write
from moesaic import atomic
from moesaic.align.accuracy import Accuracy
from moesaic.align.align import align
from moesaic.align.rewards.constraints import Constraints
from moesaic.align.rollouts.rollout import generate
from moesaic.intervals import across
from moesaic.recipe import load_recipe
from moesaic.serve.core.engine import Engine
from moesaic.worlds.environments.cards import Cards
from moesaic.worlds.example import Example

OUT = Path("out/align_stages")
RECIPE = "recipes/glm5-stages.yaml"
STAGES = {"start": "1-sft", "reasoning": "2-policy", "agentic": "3-policy", "general": "4-policy", "distilled": ""}
DOMAINS = ("reasoning", "agentic", "general")


def wide_base(seed: int) -> Path:
    """The tiny model with room for a game. Positions are rotations: it is the same model with more of them."""
    base, wide = sft_model(seed)[0], OUT / f"{seed}-base"
    if not wide.exists():
        shutil.copytree(base, wide, ignore=shutil.ignore_patterns("state", "checkpoints", "stages"))
        config = json.loads((wide / "config.json").read_text())
        (wide / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return wide


def aligned(seed: int) -> tuple[Path, float]:
    data, out = OUT / "data", OUT / f"{seed}"
    if not data.exists():
        write(data, 2_000, 400)
    recipe = load_recipe(RECIPE)
    text = json.dumps(recipe.dump()["align"]["stages"]).replace("recipes/stages-", f"{data}/stages-")
    stages = [stage | {"seed": seed} for stage in json.loads(text)]
    recipe = load_recipe(RECIPE, [f"align.stages={json.dumps(stages)}"])
    return out, timed(out, lambda: align(recipe, wide_base(seed), out, quiet=True))


def measured(place: Path, questions: int) -> dict[str, float]:
    """Each domain's own score; kept beside the runs."""
    file = OUT / f"{'-'.join(place.relative_to(OUT).parts)}.json"
    if not file.exists():
        model = moesaic.load(place, threads=1)
        examples = [
            Example(({"role": "user", "content": line["question"]},), facts={"constraints": line["constraints"]})
            for line in held_out(questions)
        ]
        rewards = [("constraints", 1.0, Constraints())]
        sampling = {"max_tokens": 32, "temperature": 0.0}
        groups = generate(Engine(model, seed=0), examples, 1, sampling, rewards, [0] * questions).groups
        sums = Accuracy.of([{"path": "builtin:sums"}], questions, 32)
        games = Accuracy.of((), questions // 3, 16, Cards())
        assert sums is not None and games is not None
        found = (sums(model)["accuracy"], games(model)["accuracy"], sum(g[0].judged.total for g in groups) / questions)
        atomic.write_json(file, dict(zip(DOMAINS, found, strict=True)))
    said: dict[str, float] = json.loads(file.read_text())
    return said


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--questions", type=int, default=96)
    options.add_argument("--no-record", action="store_true", help="print only")
    asked = options.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STAGES}
    seconds = []
    for seed in asked.seeds:
        out, spent = aligned(seed)
        seconds.append(round(spent, 1))
        for name, folder in STAGES.items():
            found[name].append(measured(out / "stages" / folder if folder else out, asked.questions))
    rows: list[dict[str, Any]] = []
    for name, every in found.items():
        scores = {domain: [one[domain] for one in every] for domain in DOMAINS}
        rows.append({"after": name, **{d: {"mean": across(v), "seeds": v} for d, v in scores.items()}})
        print(f"{name:10}", "  ".join(f"{domain} {across(values)}" for domain, values in scores.items()))
    for domain in DOMAINS:
        pairs = list(zip(found[domain], found["general"], found["distilled"], strict=True))
        forgotten = [own[domain] - without[domain] for own, without, _ in pairs]
        recovered = [again[domain] - without[domain] for _, without, again in pairs]
        rows.append({"domain": domain, "forgotten_without": across(forgotten), "regained": across(recovered)})
        print(f"{domain:10} forgotten without distillation {across(forgotten)}, regained by it {across(recovered)}")
    if not asked.no_record:
        print(record("align_stages", rows, seeds=asked.seeds, questions=asked.questions, seconds=seconds))


if __name__ == "__main__":
    main()
