"""The stages of a quickstart: each runs once, prints its result and records it.

Everything is in one directory. The results of the stages are in its quickstart.json, which is replaced atomically after
every stage; a stage recorded there is not run again, and one that was interrupted resumes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import moesaic
from moesaic import atomic
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.quickstart import summaries
from moesaic.recipe import Recipe, load_recipe

RECIPES = Path(moesaic.__file__).parents[1] / "recipes"
CALIBRATION = 600  # questions to calibrate quantization on
FILE = "quickstart.json"
MACHINE = ("Machine", "Its hardware decides how the model is run.")
RENAMED = {"begun": "upcycled", "taught": "sft"}  # stages, and the directories of their models, of the last version


@dataclass(frozen=True)
class Stage:
    title: str
    why: str
    run: Callable[[], dict[str, Any]]  # returns what is recorded of it
    summary: Callable[[dict[str, Any]], summaries.Rows]


class Life(ABC):
    family = "sums"  # of the questions
    questions: int  # held-out questions every model is evaluated on
    max_tokens = 32  # of a response
    pretrains: str  # the recipe that overrides are for, unless they begin with "align."

    def __init__(self, out: Path, console: Console, *, overrides: tuple[str, ...] = ()) -> None:
        """`overrides` are those of `moesaic align` where they begin so, and of `moesaic train` otherwise."""
        self.out, self.console, self.overrides = out, console, overrides
        self.known: dict[str, Any] = self._read()  # the results of the stages

    @abstractmethod
    def stages(self) -> dict[str, Stage]: ...

    @abstractmethod
    def models(self) -> dict[str, Path]:
        """The model after each stage; the last is served."""

    def run(self) -> Path:
        """All stages; returns the report."""
        stages = self.stages()
        for number, (name, stage) in enumerate(stages.items(), 1):
            again = " (done already)" if name in self.known else ""
            self.console.print(
                f"\n[bold]{number}/{len(stages)}  {stage.title}[/bold]  {escape(stage.why)}[dim]{again}[/dim]",
                soft_wrap=True,
            )
            if name not in self.known:
                began = time.perf_counter()
                found = stage.run()
                self._record(name, {**found, "seconds": round(time.perf_counter() - began, 1)})
            table = Table(show_header=False, box=None, padding=(0, 2, 0, 5))
            for entry in stage.summary(self.known[name]):
                table.add_row(*map(escape, entry))
            self.console.print(table)
        from moesaic.report.life import write

        return write(self.out, self.known)

    # Stages that lives have in common

    def machine(self) -> dict[str, Any]:
        from moesaic.doctor import examine

        return {finding.name: finding.found for finding in examine() if finding.in_quickstart}

    def evaluate(self) -> dict[str, Any]:
        from moesaic.evaluate.suites import SuiteContext
        from moesaic.evaluate.suites.tasks import Tasks

        suite, found = Tasks(self.family, self.questions, self.max_tokens), {}
        with self.console.status("evaluating") as status:
            for name, place in self.models().items():
                status.update(f"evaluating the {name} model")
                found[name] = suite.run(moesaic.load(place), SuiteContext())
        return {"models": found}

    def compress_with(self, method: Any, source: Path, **options: Any) -> dict[str, Any]:
        """Calibrated on questions, through the chat template. What it costs is measured on held-out questions:
        perplexity says little of a model that was fine-tuned only to answer."""
        from moesaic.compress.compress import CompressionRequest, compress

        text = self.out / "calibration.txt"
        text.write_text(conversations(source, self.family), encoding="utf-8")
        wishes = {"samples": 16, "check_tokens": 0, "force": True, "mix": False} | options
        with self.console.status("compressing"):
            return compress(source, method, self.out / "small", CompressionRequest(data=text, **wishes))

    def recipe(self, name: str, *overrides: str) -> Recipe:
        if not (RECIPES / name).is_file():
            raise UserError(RECIPES / name, "is missing", "The quickstart runs from a clone of the repository.")
        own = [given for given in self.overrides if given.startswith("align.") == (name != self.pretrains)]
        return load_recipe(RECIPES / name, [*own, *overrides])

    def _read(self) -> dict[str, Any]:
        file = self.out / FILE
        found = read_json(file, f"Remove {self.out} to start again.") if file.exists() else {}
        for old, new in RENAMED.items():
            if old in found and (self.out / old).is_dir():
                (self.out / old).rename(self.out / new)
        return {RENAMED.get(name, name): result for name, result in found.items()}

    def _record(self, name: str, found: dict[str, Any]) -> None:
        self.known[name] = found
        self.out.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self.out / FILE, self.known, indent=2, default=str)


def conversations(model: Path, family: str) -> str:
    """Questions and answers of the training split, in the chat template of a model."""
    from moesaic.data.tasks import tasks
    from moesaic.data.tasks.families import PRESETS

    families, tokenizer = PRESETS[family], moesaic.load(model).tokenizer
    assert tokenizer is not None
    chats = []
    for number in range(CALIBRATION):
        task = tasks(families[number % len(families)], "train", number)
        turns = {"user": task.question.strip(), "assistant": task.solution}
        chats.append(tokenizer.chat([{"role": role, "content": text} for role, text in turns.items()], reply=False))
    return "".join(chats)


def finished(summary: dict[str, Any]) -> dict[str, Any]:
    """A run stopped by Ctrl-C has saved a checkpoint; the stages after it are left for the next time."""
    if summary["outcome"] == "stopped":
        raise KeyboardInterrupt
    return summary
