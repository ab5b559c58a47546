"""The stages of alignment: each is one file, found by its name, and says what is learned from what, and how it is seen
to work. The loop, optimizer, checkpoints and report are those of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moesaic.align.lora import LoraOptions
from moesaic.data.stream import Stream
from moesaic.methods import Method
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.world import World
from moesaic.recipe_sections import Count, Named, Natural, Seed, Steps
from moesaic.worlds.stage_outputs import names_stage_output

Measure = Callable[[Model], dict[str, float]]
# Metrics of every run's steps, as fnmatch has patterns.
OF_EVERY_RUN = (
    *("step", "loss", "loss/*", "lr", "tokens", "tokens_per_second", "seconds", "mfu", "grad_norm", "skipped"),
    *("balance/*", "mtp/*", "time/*", "expert_load", "constraint/*"),
)
Data = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Stage:
    exact: ClassVar[bool] = False  # whether trainer and engine must agree to the bit
    value_head: ClassVar[bool] = False  # whether a value head is trained
    on_ranks: ClassVar[bool] = False  # whether several processes can train it
    phases: ClassVar[tuple[str, ...]] = ()  # of a step, whose seconds are recorded
    records: ClassVar[tuple[str, ...]] = ()  # metrics of its steps beside those of every run; patterns

    steps: Steps = 100
    lr: float | None = None  # else the recipe's
    optimizer: Named | None = None  # else the recipe's; SFT and RL seldom like the same
    save_every: Count = 50
    evaluate_every: Natural = 10
    evaluate: Natural = 64  # held-out tasks that accuracy is measured on
    seed: Seed = 0
    lora: LoraOptions | None = None  # an adapter is trained, and the model it corrects stays as it is

    @property
    def continues(self) -> bool:
        """Whether the next stage starts from what this one makes."""
        return True

    def check(self) -> None:
        """Validate what can be, before any stage is run; what an earlier one will make is not there yet."""
        raise NotImplementedError

    def check_ranks(self, layout: ParallelLayout, accumulate: int, context: int, key: str) -> None:
        """Refuse what so many ranks and micro-batches cannot divide; `key` is where the recipe names the stage."""

    def objective_method(self) -> Method:
        """The objective."""
        raise NotImplementedError

    def stream(self, model: Model) -> Stream:
        raise NotImplementedError

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        """The stream, where it keeps files of its own in the run's directory, or has work for the other ranks."""
        return self.stream(model)

    def measure(self, model: Model) -> Measure | None:
        return None

    def measures(self) -> tuple[str, ...]:
        """The metrics that `measure` will have, said without a model; patterns."""
        return ()

    def metrics(self) -> tuple[str, ...]:
        """All that may stand in a line of its metrics.jsonl; patterns."""
        return (*OF_EVERY_RUN, *self.records, *(self.measures() if self.evaluate_every else ()))


def there(data: Data) -> Data:
    """The sources that can be looked at before any stage is run."""
    return tuple(source for source in data if not names_stage_output(source))


def sources(data: Data, keys: tuple[str, ...] = ("path", "weight", "skip")) -> Data:
    """Checks what a recipe says of a stage's sources."""
    if not data:
        raise ValueError("data names no source")
    for source in data:
        if set(source) - set(keys) or not isinstance(source.get("path"), str):
            raise ValueError(f"every source of data is {{{', '.join(f'{key}: ...' for key in keys)}}}")
        weight = source.get("weight", 1.0)
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError("the weight of a source is a number above 0")
        skip = source.get("skip", 0)
        if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
            raise ValueError("what to skip of a source is a number of examples")
    return data


PAIRS = ("path", "weight")  # keys of a source of pairs, which are read all at once
