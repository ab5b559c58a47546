"""The stages of the quickstart, in order: each calls what its own command calls, and what it made is kept.

    life = Life(Path("out/quickstart"), Console())
    life.run()                                   # a stage that is done is not done again; one half done goes on

Everything lies in one directory: data/, pilots/, base/, aligned/, small/ and report.html. What each stage came to
stands in quickstart.json, which is replaced whole after every stage.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import moesaic
from moesaic.errors import UserError
from moesaic.quickstart import tellers
from moesaic.recipe import Recipe, load_recipe

RECIPES = Path(moesaic.__file__).parents[1] / "recipes"
FAMILY = "sums"
QUESTIONS = 256  # asked of every model
CALIBRATION = 600  # sums to compress with
PILOT = 0.4  # of the steps of the long run
FILE = "quickstart.json"


@dataclass(frozen=True)
class Stage:
    title: str
    why: str
    run: Callable[[], dict[str, Any]]  # what is remembered of it
    tell: Callable[[dict[str, Any]], tellers.Rows]


class Life:
    def __init__(self, out: Path, console: Console, *, overrides: tuple[str, ...] = ()) -> None:
        """`overrides` are those of `moesaic align` where they begin so, and of `moesaic train` otherwise."""
        self.out, self.console, self.overrides = out, console, overrides
        self.known: dict[str, Any] = self._read()
        self.stages = {
            "machine": Stage(
                "This machine", "What it is good at decides how the model is run.", self.machine, tellers.machine
            ),
            "data": Stage(
                "Data", "Text becomes tokens: Python's own library, and sums with answers.", self.data, tellers.data
            ),
            "law": Stage(
                "Loss law", "Two short pilots tell how far the loss of the long run will fall.", self.law, tellers.law
            ),
            "base": Stage("Pretrain", "A GLM-4.5-shaped mixture learns to go on with text.", self.base, tellers.base),
            "aligned": Stage(
                "Align", "It learns to answer: from examples, then by trying (GRPO).", self.align, tellers.aligned
            ),
            "small": Stage("Compress", "Its weights are kept in 4 bits.", self.compress, tellers.small),
            "evaluated": Stage("Evaluate", "Questions that no stage ever saw.", self.evaluate, tellers.evaluated),
        }

    def run(self) -> Path:
        """All stages; returns the report."""
        for number, (name, stage) in enumerate(self.stages.items(), 1):
            again = " (done before)" if name in self.known else ""
            self.console.print(
                f"\n[bold]{number}/{len(self.stages)}  {stage.title}[/bold]  {escape(stage.why)}[dim]{again}[/dim]",
                soft_wrap=True,
            )
            if name not in self.known:
                began = time.perf_counter()
                found = stage.run()
                self._remember(name, {**found, "seconds": round(time.perf_counter() - began, 1)})
            table = Table(show_header=False, box=None, padding=(0, 2, 0, 5))
            for entry in stage.tell(self.known[name]):
                table.add_row(*map(escape, entry))
            self.console.print(table)
        from moesaic.report.life import write

        return write(self.out, self.known)

    # The stages

    def machine(self) -> dict[str, Any]:
        from moesaic.doctor import examine

        return {finding.name: finding.found for finding in examine() if finding.told}

    def data(self) -> dict[str, Any]:
        from moesaic.data.preparation_report import drawn
        from moesaic.data.prepare import prepare

        with drawn() as show:
            prepare(self._recipe("tiny.yaml"), self.out / "data", show=show)
        manifest = json.loads((self.out / "data" / "manifest.json").read_text())
        return {"sources": manifest["sources"], "vocabulary": manifest["vocabulary"]}

    def law(self) -> dict[str, Any]:
        from moesaic.train.law_fit import fit
        from moesaic.train.law_predict import predict
        from moesaic.train.law_runs import read_runs

        recipe = self._recipe("tiny.yaml")
        runs = [self.out / "pilots" / name for name in ("constant", "cosine")]
        for run in runs:
            self._pretrain(run, f"train.steps={int(PILOT * recipe.train.steps)}", f"schedule={{name: {run.name}}}")
        fit(read_runs(runs, "loss")).save(self.out / "law.json")
        options = [f"{key}={value}" for key, value in recipe.schedule.options.items()]
        told = predict(self.out / "law.json", recipe.schedule.name, options, steps=recipe.train.steps)
        told.save(self.out / "prediction.json")
        return {"predicted": told.final, "steps": recipe.train.steps}

    def base(self) -> dict[str, Any]:
        return {**self._pretrain(self.out / "base"), "predicted": self.known["law"]["predicted"]}

    def align(self) -> dict[str, Any]:
        from moesaic.align.align import align
        from moesaic.train.metrics import read_metrics

        told = align(self._recipe("align-tiny.yaml"), self.out / "base", self.out / "aligned")
        finished(told["stages"][-1])
        taught, tried = (read_metrics(self.models()[name]) for name in ("taught", "aligned"))
        return {
            "before": [line["accuracy"] for line in taught if "accuracy" in line][-1],
            "after": [line["accuracy"] for line in tried if "accuracy" in line][-1],
            "mismatch": max(line["mismatch_max"] for line in tried),
            "policy_steps": tried[-1]["step"],
        }

    def compress(self) -> dict[str, Any]:
        from moesaic.compress.compress import Wish, compress
        from moesaic.compress.methods.gptq import GPTQ
        from moesaic.data.tasks import tasks
        from moesaic.data.tasks.families import PRESETS

        (family,) = PRESETS[FAMILY]
        tokenizer = moesaic.load(self.out / "aligned").tokenizer
        assert tokenizer is not None
        text = self.out / "calibration.txt"
        with open(text, "w", encoding="utf-8") as file:  # in the form in which it will be spoken to
            for task in (tasks(family, "train", number) for number in range(CALIBRATION)):
                said = {"user": task.question.strip(), "assistant": task.solution}
                chat = [{"role": role, "content": content} for role, content in said.items()]
                file.write(tokenizer.chat(chat, reply=False))
        wish = Wish(data=text, samples=64, length=128, force=True)
        with self.console.status("compressing"):
            return compress(self.out / "aligned", GPTQ(bits=4, group=32), self.out / "small", wish)

    def evaluate(self) -> dict[str, Any]:
        from moesaic.evaluate.suites import Asked
        from moesaic.evaluate.suites.tasks import Tasks

        suite, found = Tasks(FAMILY, QUESTIONS, 32), {}
        with self.console.status("asking") as status:
            for name, place in self.models().items():
                status.update(f"asking the model {name}")
                found[name] = suite.run(moesaic.load(place), Asked())
        return {"models": found}

    def models(self) -> dict[str, Path]:
        """The model after each stage."""
        return {
            "pretrained": self.out / "base",
            "taught": self.out / "aligned" / "stages" / "1-sft",
            "aligned": self.out / "aligned",
            "in 4 bits": self.out / "small",
        }

    # What they share

    def _recipe(self, name: str, *overrides: str) -> Recipe:
        if not (RECIPES / name).is_file():
            raise UserError(RECIPES / name, "is missing", "The quickstart runs from a clone of the repository.")
        own = [given for given in self.overrides if given.startswith("align.") == name.startswith("align")]
        return load_recipe(RECIPES / name, [*own, *overrides])

    def _pretrain(self, out: Path, *overrides: str) -> dict[str, Any]:
        from moesaic.train.pretrain import pretrain

        return finished(pretrain(self._recipe("tiny.yaml", f"train.data={self.out / 'data'}", *overrides), out))

    def _read(self) -> dict[str, Any]:
        file = self.out / FILE
        try:
            found = json.loads(file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            raise UserError(file, "cannot be read", f"Remove {self.out} to begin again.") from None
        return found if isinstance(found, dict) else {}

    def _remember(self, name: str, found: dict[str, Any]) -> None:
        self.known[name] = found
        self.out.mkdir(parents=True, exist_ok=True)
        fresh = self.out / f"{FILE}.new"
        fresh.write_text(json.dumps(self.known, indent=2, default=str) + "\n")
        os.replace(fresh, self.out / FILE)


def finished(summary: dict[str, Any]) -> dict[str, Any]:
    """A run that Ctrl-C stopped has saved itself; the stages after it are for the next time."""
    if summary["outcome"] == "stopped":
        raise KeyboardInterrupt
    return summary
