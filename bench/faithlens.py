"""A faithfulness detector (FaithLens) beside the untrained judge of its size; what its filters and its RL are worth.

    python -m bench.faithlens --reader DIR        from a policy that can read (recipes/faithful.yaml, first stage)

Balanced accuracy on held-out claims whose labels are right by construction, each judge held to the same form: an
explanation, then yes or no. `untrained` is the reader itself; `teacher` learned from claims of which a share is
labelled wrongly or explained badly; `filtered` goes on with what the filters leave of what the teacher says,
`unfiltered` with all that has the form; `rl` is `filtered` after RL on label, explanation and form. `explained`: how
often the teacher finds the label from the explanation alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.align_tiny import timed
from bench.measure import record
from moesaic.align.align import align
from moesaic.align.critiques.judges import EngineJudge, Question
from moesaic.align.examples import TaskExamples
from moesaic.align.rewards.detector import grammar
from moesaic.align.rewards.explained import Explained
from moesaic.data.tasks.claims import label_of
from moesaic.evaluate.interval import wilson
from moesaic.recipe import Recipe, load_recipe
from moesaic.worlds.judges import Answer

RECIPE = "recipes/faithlens.yaml"
FAMILY = "claims:facts=5,instructions=false"
NO_FILTERS = {"rewards": [{"name": "format", "tags": ["explanation", "label"]}], "right": 1.0, "diverse": 1.0}


def one_stage(number: int, changes: dict[str, Any]) -> Recipe:
    stage = load_recipe(RECIPE).dump()["align"]["stages"][number] | {"evaluate_every": 0} | changes
    return load_recipe(RECIPE, [f"align.stages={json.dumps([stage])}"])


def judged(name: str, model: Path, reader: Path, claims: int) -> dict[str, Any]:
    held_out = TaskExamples(FAMILY, "test")
    found = [held_out[1000 + number] for number in range(claims)]
    questions = [Question(example.question, grammar(48), 80) for example in found]
    replies = [str(reply) for reply in EngineJudge(model).replies(questions, 0.0)]
    right: dict[str, list[bool]] = {}
    kinds: dict[str, list[bool]] = {}
    for example, reply in zip(found, replies, strict=True):
        assert example.task is not None
        correct = label_of(reply) == example.truth
        right.setdefault(str(example.truth), []).append(correct)
        kinds.setdefault(example.task.metadata["kind"], []).append(correct)
    said = [Answer(e.question, reply, truth=e.truth, task=e.task) for e, reply in zip(found, replies, strict=True)]
    helped = [float(worth == 1.0) for worth in Explained(reader=str(reader)).each(said)]
    bounds = {label: wilson(sum(one), len(one)) for label, one in right.items()}
    return {
        "judge": name,
        "balanced_accuracy": round(sum(sum(one) / len(one) for one in right.values()) / len(right), 3),
        "right": {
            label: [round(sum(one) / len(one), 3), *(round(n, 3) for n in bounds[label])]
            for label, one in right.items()
        },
        "right_by_kind": {kind: [round(sum(one) / len(one), 3), len(one)] for kind, one in sorted(kinds.items())},
        "explained": [round(n, 3) for n in (sum(helped) / claims, *wilson(sum(helped), claims))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/faithlens"))
    parser.add_argument("--reader", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250, help="of the teacher's SFT")
    parser.add_argument("--rl-steps", type=int, default=30)
    parser.add_argument("--claims", type=int, default=256)
    parser.add_argument("--judges", default="teacher,unfiltered,filtered,rl")
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    stages = {
        "teacher": (0, given.reader, {"steps": given.steps}),
        "unfiltered": (1, out / "teacher", NO_FILTERS),
        "filtered": (1, out / "teacher", {}),
        "rl": (2, out / "filtered", {"steps": given.rl_steps}),
    }
    rows: list[dict[str, Any]] = []
    for name in given.judges.split(","):
        number, start, changes = stages[name]
        recipe, place = one_stage(number, changes), out / name
        run = lambda recipe=recipe, start=start, place=place: align(recipe, start, place, quiet=True)  # noqa: E731
        seconds = timed(place, run)
        if not rows:
            rows.append(judged("untrained", given.reader, out / "teacher", given.claims))
            print(json.dumps(rows[-1]), flush=True)
        rows.append(judged(name, place, out / "teacher", given.claims) | {"seconds": round(seconds)})
        print(json.dumps(rows[-1]), flush=True)
    if not given.no_record:
        print(record("faithlens", rows, claims=given.claims))


if __name__ == "__main__":
    main()
