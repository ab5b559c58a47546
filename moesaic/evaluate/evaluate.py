"""What `moesaic evaluate` does: every suite on every model, answers cached, the numbers side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.evaluate.backends import Backend, CachedBackend, EngineBackend, UrlBackend
from moesaic.evaluate.comparison import Results, rows
from moesaic.evaluate.page import write_page
from moesaic.evaluate.suites import Suite, SuiteContext, Weights
from moesaic.model.directory import load
from moesaic.model.transformer import Model
from moesaic.serve.core.kv_policies import KVPolicy

FILE = "evaluation.json"
HERE = "this machine"  # stands where a model would, if none is measured


@dataclass
class Evaluation:
    suites: Mapping[str, Suite]
    data: Path | None = None
    out: Path | None = None
    kv_policy: KVPolicy | None = None
    api_key_env: str | None = None
    model: str | None = None  # what servers call it; None: their first
    weights: Weights = field(default_factory=Weights)

    def check(self, models: Sequence[str]) -> None:
        """Whatever can be known to be wrong before anything is loaded."""
        named: set[str] = set()
        for model in models:
            if "://" in model:
                from moesaic.serve.bench.load import check_address

                check_address(model)
            own = model.rstrip("/").removesuffix("/v1") if is_url(model) else str(Path(model).resolve())
            if own in named:
                raise UserError(model, "is named twice", "Name every model once.")
            named.add(own)
        if self.model is not None and not any(is_url(model) for model in models):
            raise UserError(
                "--model", "chooses among the models of a server", "Name a server's address, or leave it out."
            )
        if self.data is not None and not any(suite.takes_data for suite in self.suites.values()):
            raise UserError("--data", f"{', '.join(self.suites)} read no file", "Leave it out.")
        for name, suite in self.suites.items():
            if suite.takes_model != bool(models):
                problem = "is missing" if suite.takes_model else f"{name} measures no model"
                remedy = "Name a model directory or a server's address." if suite.takes_model else "Name none."
                raise UserError("MODEL", problem, remedy)
            if self.kv_policy is not None and not suite.takes_kv_policy:
                raise UserError(
                    "--kv-policy", f"{name} is not measured with a pruned cache", "Take --suite longcontext."
                )
            for model in models:
                if is_url(model) and suite.needs_model:
                    raise UserError(model, f"{name} looks into the model itself", "Name its directory.")
                if is_url(model) and self.kv_policy is not None:
                    raise UserError("--kv-policy", "is the server's own choice", "Leave it out.")
            suite.check(self.data)
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise UserError("--out", f"{self.out} is a file", "Name a directory.")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise UserError("--api-key-env", f"there is no variable {self.api_key_env}")

    def run(self, models: Sequence[str], progress: Callable[[str, int, int], None]) -> Results:
        found: Results = {}
        for place in models or [HERE]:
            loaded = load(Path(place), **vars(self.weights)) if models and not is_url(place) else None
            found[place] = {}
            called = place if is_url(place) else Path(place).name
            asks = any(not suite.needs_model for suite in self.suites.values())
            backend = self._backend(place, loaded) if asks else None  # one for all suites that ask questions
            for name, suite in self.suites.items():

                def show(done: int, total: int, what: str = f"{called}: {name}") -> None:
                    progress(what, done, total)

                context = SuiteContext(self.data, show, self.kv_policy, backend, self.weights)
                found[place][name] = suite.run(loaded, context)
                self._write(found)  # a later suite may fail, and this one may have taken hours
        return found

    def _backend(self, place: str, loaded: Model | None) -> Backend:
        key = os.environ[self.api_key_env] if self.api_key_env else None
        backend = UrlBackend(place, self.model, key) if loaded is None else EngineBackend(loaded, self.kv_policy)
        if self.out is None:
            return backend
        self.out.mkdir(parents=True, exist_ok=True)
        which = backend.model_name() if isinstance(backend, UrlBackend) else weights_of(Path(place))
        who = f"{place} {which} {self.kv_policy!r} {self.weights!r}"
        return CachedBackend(backend, self.out / "answers.jsonl", who)

    def _write(self, found: Results) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        # Through JSON, where what it has no word for (infinity, nan) becomes null.
        plain = json.loads(json.dumps({"models": found}, default=str), parse_constant=lambda word: None)
        atomic.write_json(self.out / FILE, plain, indent=2)
        write_page(self.out / "evaluation.html", found)


def weights_of(place: Path) -> str:
    """Which weights these are, without reading them: a directory may hold others than it did when answers were kept."""
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def table(found: Results) -> Table:
    shown = Table(box=None, padding=(0, 3, 0, 0))
    shown.add_column("")
    for place in found:
        shown.add_column(place, overflow="fold")
    for row in rows(found):
        shown.add_row(*row)
    return shown
