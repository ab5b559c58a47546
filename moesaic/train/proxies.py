"""Small runs that stand in for a large one: each on data of its own, all measured on the same held-out text.

    proxies = Proxies(recipe, Path("out/mix"), steps=100, on=None, tokens=65_536, on_status=..., log=...)
    loss = proxies.loss(stream, "name", seed=0)

A proxy is the recipe's own model with its optimizer and schedule, so a recipe for this is a small one. Each is a run in
a folder of its own below DIR/proxies, and resumes like any run, by the same call. The loss is the mean of those on each
source (with `data.mix_by`, on each value): every one counts alike, however large it is.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import moesaic
from moesaic.data.columns import check_column
from moesaic.data.divided import divided
from moesaic.data.packing import Batch
from moesaic.data.preparation.prepare import Status, prepare
from moesaic.data.preparation.prepare import has_progress as preparation_has_progress
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
from moesaic.train.validate import check, check_data

HELD_OUT = 0.05  # of the documents, where the recipe holds none out
PROXIES = "proxies"
LOSS = "loss.json"
REQUEST = "proxy.json"


class Proxies:
    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        *,
        steps: int,
        on: str | None,
        tokens: int,
        column: str | None = None,
        on_status: Callable[[Status], None] = lambda status: None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.out, self.steps, self.on, self.tokens = _for_proxies(recipe, steps), out, steps, on, tokens
        self.on_status, self.log = on_status, log
        recipe = self.recipe
        check(recipe)
        outside = on is not None and (Path(on) / MANIFEST).is_file()
        if recipe.data.mix_by is None and not outside:
            _check_on(on, [source.name for source in recipe.data.sources])
        self.folder = Path(recipe.train.data) if recipe.train.data else out / "data"
        if not recipe.train.data:
            if column is not None and not (self.folder / MANIFEST).exists():
                check_data(recipe)
                check_column(column, recipe.data, "--column")
            prepare(recipe, self.folder, on_status=on_status)
        self.whole = Shards(self.folder)
        self.data, self.section = divided(self.whole, recipe.data)
        self.names = [source.name for source in self.section.sources]
        sources: list[str] | list[None]
        if outside:
            measured, sources = _outside(str(on), self.whole), [None]
        else:  # the text that is measured on may be a source's, whatever is mixed
            measured, sources = self.whole if on in self.whole.domains else self.data, [on] if on else self.names
            _check_on(on, [*self.names, *self.whole.domains])
        world, length = World(hardware.device()), recipe.data.sequence_length
        self.measured = [
            HeldOutLoss(measured, tokens=tokens, sequence_length=length, world=world, source=name) for name in sources
        ]
        self.total = self.done = 0  # steps of all proxies, as far as they are known

    def loss(self, stream: TokenStream, name: str, seed: int) -> float:
        """Of a proxy trained on this stream, or that which was measured before for the very same."""
        mine, place = self._request(stream, seed, {}), self._place(name, seed)
        request = {**mine, "on": self.on, "tokens": self.tokens}
        if (loss := _known(place, request)) is None:
            model = moesaic.load(self.trained(stream, name, seed))
            loss = statistics.mean(held_out(model) for held_out in self.measured)
            write_json(place / LOSS, {"loss": loss, "request": request})
        else:
            self.done += self.steps
        self.log(f"{name}, seed {seed}: held-out loss {loss:.4f}")
        return loss

    def trained(self, stream: TokenStream, name: str, seed: int, **train_keys: Any) -> Path:
        """The directory of a proxy trained on this stream; `train_keys` are of its recipe."""
        place, before = self._place(name, seed), self.done
        self.on_status(Status(name, before, self.total))
        _start(place, self._request(stream, seed, train_keys))
        mine = self.recipe.changed(train={"seed": seed, **train_keys})
        run = _Proxy(
            mine, place, self.folder, stream, lambda done: self.on_status(Status(name, before + done, self.total))
        )
        train(run)
        if run.step < self.steps:
            raise KeyboardInterrupt  # the run has saved where it was
        self.done += self.steps
        return place

    def _place(self, name: str, seed: int) -> Path:
        return self.out / PROXIES / f"{_plain(name)}-seed{seed}"

    def _request(self, stream: TokenStream, seed: int, train_keys: dict[str, Any]) -> dict[str, Any]:
        mine = self.recipe.changed(train={"seed": seed, **train_keys})
        return {"data": self.data.fingerprint, "recipe": mine.dump(), "order": stream.plan.fingerprint}


def has_progress(out: Path) -> bool:
    """Whether there is something to resume from: a proxy, or data that is being prepared."""
    return (out / PROXIES).is_dir() or preparation_has_progress(out / "data")


class _Proxy(Run):
    """A run on given data, with progress."""

    plots = False

    def __init__(
        self, recipe: Recipe, out: Path, data: Path, stream: TokenStream, on_step: Callable[[int], None]
    ) -> None:
        super().__init__(recipe, out, data, quiet=True, stream=lambda model: stream.from_position(None))
        self.on_step = on_step

    def log_step(self, batch: Batch, loss: Loss, result: StepResult, loads: dict[int, Tensor]) -> None:
        super().log_step(batch, loss, result, loads)
        self.on_step(self.step)


def _outside(directory: str, data: Shards) -> Shards:
    """Prepared data that is only measured on."""
    found = Shards(directory)
    if found.manifest["tokenizer"] != data.manifest["tokenizer"]:
        remedy = f"Prepare it with data.tokenizer={data.directory / 'tokenizer'}."
        raise UserError(f"--on {directory}", "was prepared with another tokenizer than the data that is mixed", remedy)
    return found


def _check_on(on: str | None, names: list[str]) -> None:
    if on is not None and on not in names:
        raise UserError("--on", f'no source is named "{on}"{did_you_mean(on, names)}')


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
    """The recipe of a short run: no phases, no curriculum, something held out."""
    warmup = min(recipe.train.warmup_steps, steps // 10)
    section: dict[str, Any] = {"phases": (), "curriculum": None}
    if not recipe.data.held_out and not recipe.train.data:
        section["held_out"] = HELD_OUT
    return recipe.changed(train={"steps": steps, "tokens": None, "warmup_steps": warmup, "keep_last": 1}, data=section)


def _plain(name: str) -> str:
    """A proxy's name as a folder's."""
    return re.sub(r"[^\w.-]+", "-", name.replace("%", ""))
