"""XTC's long schedules on real text: a float teacher, and students of half its depth with float, ternary and binary
weights, each distilled for a short and for a long while (recipes/tiny.yaml and recipes/xtc.yaml, larger).

    python bench/gpu_xtc.py                        about 8 minutes on an H200: 6 of training, the rest data and kernels
    python bench/gpu_xtc.py --minutes 3            the same in less
    python bench/gpu_xtc.py --tiny                 on a CPU, a minute: every line runs, and no number means anything

The text is the source code of Python's standard library (some 3 million tokens, so a long run sees it several times),
2 % of its files held out. The paper's claim is that one stage, a large learning rate and many steps suffice: the gap to
the teacher that a short schedule leaves should shrink by half or more with the long one (goal). How many steps
"long" is, is measured first: so many that all runs fit into the minutes; short is a fifth of it. Loss and next-token
accuracy are on held-out text, with the weights as they will be packed; `agrees` is how often a student's likeliest
token is the teacher's. Blocks are not compiled: that would take longer than it gains here. Rows go to
bench/results/gpu_xtc.json as they come; a run that fails is written down and the rest goes on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.measure import record
from moesaic.compress.methods.students import spread
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model import directory
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import Recipe, load_recipe
from moesaic.train import run as runs
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.loop import train
from moesaic.train.objectives import inputs_of, layout_of
from moesaic.train.run import Run

ROOT = Path(__file__).resolve().parent.parent
# Of the tiny recipes, in their own words.
MODEL = ["model.vocab=4096", "model.hidden=256", "model.layers=4", "model.heads=8", "model.head_size=32"]
MODEL += ["model.kv_heads=4", "model.dense_hidden=768", "model.expert_hidden=192", "model.context=512"]
BATCH = ["train.batch_tokens=16384", "data.sequence_length=512"]
TINY = ["model.vocab=512", "train.batch_tokens=1024", "data.sequence_length=128", "model.context=256"]
TEXT = "data.sources=[{name: code, path: 'builtin:stdlib', weight: 1.0%s}]"
FLOAT, BINARY = "train.constraint=null", "train.constraint={name: quantized, bits: 1, group: 64, symmetric: false}"
TERNARY = "train.constraint={name: quantized, bits: 2, group: 64, ternary: true}"
RUNS = 4.4  # of so many steps as a long one has: the teacher's, three long ones, two short ones
SHORT = 0.2


class Bench:
    def __init__(self, place: Path, tiny: bool) -> None:
        self.place, self.tiny = place, tiny
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.failed: list[str] = []
        self.world = World(torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu"))
        common = [TEXT % (", documents: 60" if tiny else ""), "data.held_out=0.05" if tiny else "data.held_out=0.02"]
        self.common = [*common, *(TINY[1:3] if tiny else BATCH), "train.dtype=float32", "train.evaluate_every=0"]
        self.teacher_recipe = load_recipe(
            ROOT / "recipes/tiny.yaml", [*(TINY if tiny else MODEL), *self.common, "optimizer.lr=0.01"]
        )

    def save(self) -> None:
        if not self.tiny:
            record("gpu_xtc", self.rows, failed=self.failed, **self.facts)

    def prepare(self) -> None:
        begun = time.perf_counter()
        prepare(self.teacher_recipe, self.place / "data")
        data = Shards(self.place / "data")
        tokens = 8192 if self.tiny else 65536
        length = self.teacher_recipe.data.sequence_length
        self.held_out = HeldOutLoss(data, tokens=tokens, sequence_length=length, world=self.world)
        self.facts |= {
            "training_tokens": int(data.lengths[~data.held_out].sum()),
            "held_out_tokens": self.held_out.count,
        }
        self.facts["prepared_seconds"] = round(time.perf_counter() - begun, 1)
        print(self.facts, flush=True)

    def trained(self, recipe: Recipe, name: str) -> tuple[Model, float]:
        """A run, and its seconds a step once it is warm."""
        run = Run(recipe, self.place / name, self.place / "data", quiet=True, world=self.world)
        run.plots = False
        begun = time.perf_counter()
        train(run)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        assert run.done(), "the run was stopped"
        return run.model, (time.perf_counter() - begun) / recipe.train.steps

    def steps(self, recipe: list[str], steps: int) -> list[str]:
        return [
            *recipe,
            f"train.steps={steps}",
            f"train.warmup_steps={max(1, steps // 20)}",
            f"train.save_every={steps}",
        ]

    def teacher(self, steps: int, name: str = "teacher") -> tuple[Model, float]:
        given = [*(TINY if self.tiny else MODEL), *self.common, "optimizer.lr=0.01"]
        return self.trained(load_recipe(ROOT / "recipes/tiny.yaml", self.steps(given, steps)), name)

    def student(self, constraint: str, steps: int, name: str, teacher: str) -> tuple[Model, float]:
        given = [f"data.tokenizer={self.place / 'data'}", f"train.init={self.place / (teacher + '-half')}"]
        given += [f"train.objective={{name: distill, teacher: {self.place / teacher}, weight: 0.9}}", constraint]
        recipe = load_recipe(ROOT / "recipes/xtc.yaml", self.steps([*self.common, *given], steps))
        return self.trained(recipe, name)

    def halve(self, teacher: str) -> None:
        """Every second layer, as a student begins."""
        model = directory.load(self.place / teacher)
        kept = spread(len(model.config.layers), 0.5)
        small = Model(replace(model.config, layers=tuple(model.config.layers[number] for number in kept)))
        state = model.state_dict()
        found = {}
        for name in small.state_dict():
            parts = name.split(".")
            if parts[0] == "layers":
                parts[1] = str(kept[int(parts[1])])
            found[name] = state[".".join(parts)].cpu()
        small.load_state_dict(found)
        small.tokenizer = model.tokenizer
        directory.save(small, self.place / f"{teacher}-half")

    @torch.no_grad()
    def likeliest(self, model: Model) -> tuple[torch.Tensor, float]:
        """The likeliest token at each place of the held-out text, and how often it came."""
        found, right = [], 0
        for batch in self.held_out.batches:
            hidden_TD = model(inputs_of(model, batch), layout_of(batch))
            wanted = batch.targets_T != IGNORED
            best_T = model.logits_at(hidden_TD[wanted]).argmax(-1)
            right += int((best_T == batch.targets_T[wanted]).sum())
            found.append(best_T)
        best = torch.cat(found)
        return best, right / len(best)

    def tell(self, what: str, steps: int, model: Model, seconds: float) -> None:
        best, accuracy = self.likeliest(model)
        if what == "teacher":
            self.best = best
        row = {"what": what, "steps": steps, "held_out_loss": round(float(self.held_out(model)), 4)}
        row |= {"accuracy": round(accuracy, 4), "agrees": round((best == self.best).float().mean().item(), 4)}
        row["seconds"] = round(seconds * steps, 1)
        self.rows.append(row)
        print(row, flush=True)
        self.save()

    def long(self, minutes: float) -> int:
        """Steps of a long run, by how long a step of the teacher and of a binary student takes."""
        count = 3 if self.tiny else 30
        self.teacher(2, "warm")  # compiles
        _, teacher = self.teacher(count, "probe")
        self.halve("probe")
        self.student(BINARY, 2, "warm-student", "probe")
        _, student = self.student(BINARY, count, "probe-student", "probe")
        self.facts |= {"teacher_step_ms": round(teacher * 1e3, 1), "student_step_ms": round(student * 1e3, 1)}
        wanted = minutes * 60 / (teacher + (RUNS - 1) * student)
        self.facts["long_steps"] = max(20, min(6000, int(wanted)))
        print(self.facts, flush=True)
        return self.facts["long_steps"]  # type: ignore[no-any-return]

    def run(self, minutes: float) -> None:
        self.prepare()
        long = self.long(minutes)
        model, seconds = self.teacher(long)
        self.tell("teacher", long, model, seconds)
        self.halve("teacher")
        short = max(5, round(SHORT * long))
        plans = [("float", FLOAT, long), ("ternary", TERNARY, short), ("ternary", TERNARY, long)]
        for what, constraint, steps in [*plans, ("binary", BINARY, short), ("binary", BINARY, long)]:
            name = f"{what}, {'long' if steps == long else 'short'}"
            try:
                model, seconds = self.student(constraint, steps, name.replace(", ", "-"), "teacher")
                self.tell(name, steps, model, seconds)
            except Exception as error:
                self.failed.append(f"{name}: {type(error).__name__}: {error}"[:300])
                traceback.print_exc()
                self.save()
        self.compare()

    def compare(self) -> None:
        """What of a short schedule's gap to the teacher the long one took off."""
        losses = {row["what"]: row["held_out_loss"] for row in self.rows}
        for what in ("ternary", "binary"):
            if {f"{what}, short", f"{what}, long"} <= losses.keys():
                gaps = [losses[f"{what}, {length}"] - losses["teacher"] for length in ("short", "long")]
                self.facts[f"{what}_gap_taken_off"] = round(1 - gaps[1] / gaps[0], 3) if gaps[0] > 0 else None
        print({key: value for key, value in self.facts.items() if key.endswith("off")}, flush=True)
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, all runs together")
    parser.add_argument("--tiny", action="store_true", help="20 steps of a tiny model on a CPU, recorded nowhere")
    options = parser.parse_args()
    runs.compile_blocks = lambda model: None
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), options.tiny)
        bench.run(0.0 if options.tiny else options.minutes)
    print("failed:", bench.failed or "nothing", flush=True)
    if options.tiny and bench.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
