"""The proxies of Kaiyuan-2B's quantile data benchmarking: a small run on each slice of each source, then its loss.

    report = run_proxies(load_recipe("recipes/tiny.yaml"), Path("out/quantiles"), steps=100)
    print(report.table.text())

The proxy is the recipe's own model with its optimizer and schedule, so a recipe for this is a small one. Each slice is
a run in a folder of its own below DIR/proxies, and resumes like any run, by the same call. All are measured on the same
held-out text, and every source counts alike, however large it is.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import moesaic
from moesaic.data.columns import check_column
from moesaic.data.packing import Batch
from moesaic.data.preparation.prepare import Status, prepare
from moesaic.data.preparation.prepare import has_progress as preparation_has_progress
from moesaic.data.quantiles import QuantileTable, benchmark_quantiles
from moesaic.data.shards import MANIFEST, Shards
from moesaic.data.stream import TokenStream
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.kernels import hardware
from moesaic.parallel.world import World
from moesaic.recipe import Recipe
from moesaic.strict import did_you_mean
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.law.loss_law import write_json
from moesaic.train.loop import train
from moesaic.train.objectives import Loss
from moesaic.train.optimizers import StepResult
from moesaic.train.run import Run
from moesaic.train.validate import check

HELD_OUT = 0.05  # of the documents, where the recipe holds none out
RESULT = "quantiles.json"
PROXIES = "proxies"
LOSS = "loss.json"
REQUEST = "proxy.json"


@dataclass
class Quantiles:
    table: QuantileTable
    losses: dict[str, list[float]]  # by slice, one for each seed
    warnings: list[str] = field(default_factory=list)

    @property
    def noise(self) -> float | None:
        """How far the losses of one slice lie apart for nothing but the seed: their standard deviation, pooled."""
        spreads = [statistics.variance(losses) for losses in self.losses.values() if len(losses) > 1]
        return statistics.mean(spreads) ** 0.5 if spreads else None


def run_proxies(
    recipe: Recipe,
    out: Path,
    *,
    steps: int = 100,
    quantiles: int = 4,
    column: str = "quality",
    on: str | None = None,
    seeds: int = 1,
    tokens: int = 65_536,
    on_status: Callable[[Status], None] = lambda status: None,
    log: Callable[[str], None] = lambda text: None,
) -> Quantiles:
    """Train `steps` on each of `quantiles` slices of every source, `seeds` times.

    The loss is on `tokens` held-out tokens of the source `on`, or of each source."""
    recipe = _for_proxies(recipe, steps)
    check(recipe)
    names = [source.name for source in recipe.data.sources]
    if on is not None and on not in names:
        raise UserError("--on", f'no source is named "{on}"{did_you_mean(on, names)}')
    folder = Path(recipe.train.data) if recipe.train.data else out / "data"
    if not recipe.train.data:
        if not (folder / MANIFEST).exists():
            check_column(column, recipe.data, "--column")
        prepare(recipe, folder, on_status=on_status)
    data = Shards(folder)
    sequence_length = recipe.data.sequence_length
    measured = [
        HeldOutLoss(data, tokens=tokens, sequence_length=sequence_length, world=World(hardware.device()), source=name)
        for name in ([on] if on else names)
    ]
    total, losses = steps * quantiles * len(names) * seeds, dict[str, list[float]]()
    warnings: list[str] = []

    def proxy(stream: TokenStream, name: str) -> float:
        losses[name] = []
        warnings.extend(stream.plan.warnings)
        for seed in range(recipe.train.seed, recipe.train.seed + seeds):
            before = steps * (sum(map(len, losses.values())))
            place = out / PROXIES / f"{_plain(name)}-seed{seed}"
            mine = recipe.changed(train={"seed": seed})
            trained = {"data": data.fingerprint, "recipe": mine.dump(), "order": stream.plan.fingerprint}
            request = {**trained, "on": on, "tokens": tokens}
            if (loss := _known(place, request)) is None:
                on_status(Status(name, before, total))
                _start(place, trained)
                run = _Proxy(mine, place, folder, stream, lambda done: on_status(Status(name, before + done, total)))  # noqa: B023
                train(run)
                if run.step < steps:
                    raise KeyboardInterrupt  # the run has saved where it was
                model = moesaic.load(place)
                loss = statistics.mean(held_out(model) for held_out in measured)
                write_json(place / LOSS, {"loss": loss, "request": request})
            losses[name].append(loss)
            log(f"{name}, seed {seed}: held-out loss {losses[name][-1]:.4f}")
        return statistics.mean(losses[name])

    section = recipe.data
    table = benchmark_quantiles(
        data,
        section,
        proxy,
        tokens=steps * recipe.train.batch_tokens,
        batch_tokens=recipe.train.batch_tokens,
        quantiles=quantiles,
        column=column,
    )
    found = Quantiles(table, losses, warnings)
    write_json(out / RESULT, report(found))
    return found


def has_progress(out: Path) -> bool:
    """Whether there is something to resume from: a proxy, or data that is being prepared."""
    return (out / PROXIES).is_dir() or preparation_has_progress(out / "data")


def report(found: Quantiles) -> dict[str, Any]:
    """Plain values."""
    table = found.table
    return {
        "column": table.column,
        "slices": [vars(piece) for piece in table.slices],
        "losses": found.losses,
        "noise": found.noise,
        "quality": table.quality,
        "phases": [phase.model_dump(mode="json") for phase in table.recommendation.phases],
        "warnings": found.warnings,
    }


class _Proxy(Run):
    """A run on a slice, with progress."""

    plots = False

    def __init__(
        self, recipe: Recipe, out: Path, data: Path, stream: TokenStream, on_step: Callable[[int], None]
    ) -> None:
        super().__init__(recipe, out, data, quiet=True, stream=lambda model: stream.from_position(None))
        self.on_step = on_step

    def log_step(self, batch: Batch, loss: Loss, result: StepResult, loads: dict[int, Tensor]) -> None:
        super().log_step(batch, loss, result, loads)
        self.on_step(self.step)


def _known(place: Path, request: dict[str, Any]) -> float | None:
    """The loss that was measured before, for this very request."""
    file = place / LOSS
    known = read_json(file) if file.is_file() else {}
    return float(known["loss"]) if known.get("request") == request else None


def _start(place: Path, request: dict[str, Any]) -> None:
    """A run of another request (other steps, another recipe) is not resumed, but removed."""
    file = place / REQUEST
    if place.exists() and not (file.is_file() and read_json(file) == request):
        shutil.rmtree(place)
    place.mkdir(parents=True, exist_ok=True)
    write_json(file, request)


def _for_proxies(recipe: Recipe, steps: int) -> Recipe:
    """The recipe of a short run on one slice: no phases, no curriculum, something held out."""
    warmup = min(recipe.train.warmup_steps, steps // 10)
    section: dict[str, Any] = {"phases": (), "curriculum": None}
    if not recipe.data.held_out and not recipe.train.data:
        section["held_out"] = HELD_OUT
    return recipe.changed(train={"steps": steps, "warmup_steps": warmup, "keep_last": 1}, data=section)


def _plain(name: str) -> str:
    """A slice's name as a folder's."""
    return re.sub(r"[^\w.-]+", "-", name.replace("%", ""))
