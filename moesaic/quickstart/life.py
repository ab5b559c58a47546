"""A life in stages: each is done once, what it made is kept, and what it came to is told and remembered.

A life lies in one directory. What each stage came to stands in its quickstart.json, which is replaced whole after every
stage; a stage that is there is not done again, and one that was half done goes on where it was.
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
CALIBRATION = 600  # questions to compress with
FILE = "quickstart.json"


@dataclass(frozen=True)
class Stage:
    title: str
    why: str
    run: Callable[[], dict[str, Any]]  # what is remembered of it
    tell: Callable[[dict[str, Any]], summaries.Rows]


class Life(ABC):
    family = "sums"  # of the questions
    questions: int  # asked of every model
    max_tokens = 32  # of an answer
    pretrains: str  # the recipe that overrides are for, unless they begin with "align."

    def __init__(self, out: Path, console: Console, *, overrides: tuple[str, ...] = ()) -> None:
        """`overrides` are those of `moesaic align` where they begin so, and of `moesaic train` otherwise."""
        self.out, self.console, self.overrides = out, console, overrides
        self.known: dict[str, Any] = self._read()

    @abstractmethod
    def stages(self) -> dict[str, Stage]: ...

    @abstractmethod
    def models(self) -> dict[str, Path]:
        """The model after each stage; the last is served."""

    def run(self) -> Path:
        """All stages; returns the report."""
        stages = self.stages()
        for number, (name, stage) in enumerate(stages.items(), 1):
            again = " (done before)" if name in self.known else ""
            self.console.print(
                f"\n[bold]{number}/{len(stages)}  {stage.title}[/bold]  {escape(stage.why)}[dim]{again}[/dim]",
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

    # What lives have in common

    def machine(self) -> dict[str, Any]:
        from moesaic.doctor import examine

        return {finding.name: finding.found for finding in examine() if finding.told}

    def evaluate(self) -> dict[str, Any]:
        from moesaic.evaluate.suites import Asked
        from moesaic.evaluate.suites.tasks import Tasks

        suite, found = Tasks(self.family, self.questions, self.max_tokens), {}
        with self.console.status("asking") as status:
            for name, place in self.models().items():
                status.update(f"asking the model {name}")
                found[name] = suite.run(moesaic.load(place), Asked())
        return {"models": found}

    def compress_with(self, method: Any, source: Path, **wishes: Any) -> dict[str, Any]:
        """Calibrated on questions, in the form in which the model will be spoken to. What it cost, other questions will
        tell: how well it foretells them says little of a model that was taught only to answer."""
        from moesaic.compress.compress import CompressionRequest, compress

        text = self.out / "calibration.txt"
        text.write_text(conversations(source, self.family), encoding="utf-8")
        with self.console.status("compressing"):
            return compress(
                source, method, self.out / "small", CompressionRequest(data=text, check_tokens=0, force=True, **wishes)
            )

    def recipe(self, name: str, *overrides: str) -> Recipe:
        if not (RECIPES / name).is_file():
            raise UserError(RECIPES / name, "is missing", "The quickstart runs from a clone of the repository.")
        own = [given for given in self.overrides if given.startswith("align.") == (name != self.pretrains)]
        return load_recipe(RECIPES / name, [*own, *overrides])

    def _read(self) -> dict[str, Any]:
        file = self.out / FILE
        return read_json(file, f"Remove {self.out} to start again.") if file.exists() else {}

    def _remember(self, name: str, found: dict[str, Any]) -> None:
        self.known[name] = found
        self.out.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self.out / FILE, self.known, indent=2, default=str)


def conversations(model: Path, family: str) -> str:
    """Questions and answers of the training split, in the form in which a model is spoken to."""
    from moesaic.data.tasks import tasks
    from moesaic.data.tasks.families import PRESETS

    families, tokenizer = PRESETS[family], moesaic.load(model).tokenizer
    assert tokenizer is not None
    said = []
    for number in range(CALIBRATION):
        task = tasks(families[number % len(families)], "train", number)
        turns = {"user": task.question.strip(), "assistant": task.solution}
        said.append(tokenizer.chat([{"role": role, "content": text} for role, text in turns.items()], reply=False))
    return "".join(said)


def finished(summary: dict[str, Any]) -> dict[str, Any]:
    """A run that Ctrl-C stopped has saved itself; the stages after it are for the next time."""
    if summary["outcome"] == "stopped":
        raise KeyboardInterrupt
    return summary
