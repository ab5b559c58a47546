"""Checkpoints of a run: `DIR/checkpoints/step-N` is a whole model directory with a `state/` of its own.

DIR itself is a model directory too: its model files are links through `checkpoints/latest`, one link that is replaced
atomically, so whoever opens DIR sees one complete checkpoint. When the run ends, they become files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.model import directory
from moesaic.model.config import ModelConfig
from moesaic.model.families import Place, read_config
from moesaic.model.formats import tensor_file
from moesaic.model.value_head import write_head

SHOWN = Path("checkpoints") / "latest"  # where DIR's links lead


@dataclass
class Snapshot:
    """The whole state of a run after a step, copied, so that it can be written while training goes on."""

    step: int
    config: ModelConfig
    weights: dict[str, Tensor]
    dtype: torch.dtype
    files: dict[str, bytes]
    life: list[dict[str, Any]]
    tensors: dict[str, dict[str, Tensor]]  # group (optimizer, average, ...) -> name -> tensor
    numbers: dict[str, Any]  # JSON: step, data position, ...


class Checkpoints:
    """`saved` is called with the step of each checkpoint once it is on disk, at the next call of `wait` or `poll`."""

    def __init__(
        self, run: Path, keep_last: int, keep_every: int, saved: Callable[[int], None] = lambda step: None
    ) -> None:
        self.run, self.saved = run, saved
        self.folder = run / "checkpoints"
        self.keep_last, self.keep_every = keep_last, keep_every
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[int] | None = None

    def steps(self) -> list[int]:
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*")]
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def dtype(self, step: int) -> str:
        """The dtype of the weights of a checkpoint."""
        file = self.path(step) / "config.json"
        return read_config(read_json(file), file).dtype

    def save(self, snapshot: Snapshot) -> None:
        """Write in the background, after the one before is done."""
        self.wait()
        self._writing = self._writer.submit(self._write, snapshot)

    def wait(self) -> None:
        """Until what is being written is on disk; an error of the writer is raised here."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self.saved(writing.result())

    def poll(self) -> None:
        """The same for a checkpoint that is written by now, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _write(self, snapshot: Snapshot) -> int:
        def tensor(place: Place) -> Tensor:
            whole = snapshot.weights[place.parameter]
            return whole[place.part] if place.part else whole

        def state(fresh: Path) -> None:
            write_head(fresh, snapshot.weights)
            (fresh / "state").mkdir()
            for group, tensors in snapshot.tensors.items():
                file = fresh / "state" / f"{group}.safetensors"
                if group == "optimizer":  # the largest, and so a tensor at a time
                    tensor_file.write(
                        file,
                        [(name, t.dtype, tuple(t.shape), partial(Tensor.detach, t)) for name, t in tensors.items()],
                    )
                else:
                    save_file({name: t.contiguous() for name, t in tensors.items()}, file)
            (fresh / "state" / "run.json").write_text(json.dumps(snapshot.numbers, indent=1))

        path = self.path(snapshot.step)
        state_bytes = sum(t.numel() * t.element_size() for group in snapshot.tensors.values() for t in group.values())
        directory.write(
            path,
            snapshot.config,
            tensor,
            snapshot.dtype,
            snapshot.files,
            snapshot.life,
            also=state,
            also_bytes=state_bytes,
        )
        self._publish(path)
        self._prune()
        return snapshot.step

    def _publish(self, path: Path) -> None:
        atomic.write_link(self.folder / "latest", path.name)
        for link, target in self._links(path):
            link.parent.mkdir(exist_ok=True)
            # Files that an earlier end of the run made DIR's own are links again once it is resumed.
            if not (link.is_symlink() and link.readlink() == target):
                atomic.write_link(link, target)

    def _links(self, path: Path) -> list[tuple[Path, Path]]:
        """A checkpoint's files but its state, as DIR shows them: each link, and where it leads."""
        files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        shown = [name for name in files if name.parts[0] != "state"]
        return [(self.run / name, Path(*[".."] * (len(name.parts) - 1)) / SHOWN / name) for name in shown]

    def forget(self, after: int) -> None:
        """Remove the checkpoints after a step, newest first: none of them is to be resumed from."""
        self._publish(self.path(after))
        self._remove([step for step in reversed(self.steps()) if step > after])

    def _prune(self) -> None:
        old = self.steps()[: -self.keep_last]
        self._remove([step for step in old if not (self.keep_every and step % self.keep_every == 0)])

    def _remove(self, steps: Sequence[int]) -> None:
        """Each disappears atomically, by a rename: half a checkpoint must not be resumed from."""
        for step in steps:
            path = self.path(step)
            path.rename(path.with_name(f".{path.name}.gone"))
        for gone in self.folder.glob(".step-*.gone"):  # a killed run's too
            shutil.rmtree(gone, ignore_errors=True)

    def finish(self) -> None:
        """The run is over: DIR's links become files (hard links where the file system has them)."""
        self.wait()
        for link, target in self._links(self.run / SHOWN):
            if link.is_symlink() and link.readlink() == target:  # another is someone else's
                with atomic.replacing_file(link) as fresh:
                    try:
                        os.link(link.resolve(), fresh)
                    except OSError:
                        shutil.copy2(link, fresh)

    def read(self, step: int) -> tuple[dict[str, Any], Callable[[str], dict[str, Tensor]]]:
        """The numbers of a checkpoint, and a function that reads a group of its tensors (none if it has no such)."""
        state = self.path(step) / "state"
        remedy = "Remove this checkpoint to resume from the one before."
        numbers = read_json(state / "run.json", remedy)
        if missing := {"step", "position", "watch", "report", "recipe", "life"} - numbers.keys():
            raise UserError(state / "run.json", f"is not a run's: it has no {min(missing)}", remedy)

        def group(name: str) -> dict[str, Tensor]:
            file = state / f"{name}.safetensors"
            if not file.exists():
                return {}
            try:
                return load_file(file)
            except (OSError, SafetensorError) as error:
                raise UserError(file, f"cannot be read ({error})", remedy) from None

        return numbers, group
