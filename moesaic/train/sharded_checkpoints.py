"""Checkpoints that many ranks write together: the same directory that one process writes, so any layout resumes it.

The first rank lays out every file with holes; then each rank writes its own boxes of every tensor to their places, and
nothing travels between ranks. The directory takes its place when all have said that theirs are on disk: a rank that
dies before leaves the last checkpoint as it was. Ranks share the directory, as on a cluster's file system.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.families import Place
from moesaic.model.formats import tensor_file
from moesaic.model.formats.tensor_file import TensorFile
from moesaic.model.value_head import write_head
from moesaic.parallel.boxes import boxes_to_write
from moesaic.parallel.parts import Region
from moesaic.sharded import local
from moesaic.train.checkpoints import Checkpoints, Snapshot

if TYPE_CHECKING:
    from moesaic.parallel.ranks import Ranks


class ShardedCheckpoints(Checkpoints):
    def __init__(self, world: Ranks, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.world = world

    def owned(self, parameters: dict[str, Tensor]) -> None:
        """The model's tensors as they are divided: a snapshot holds this rank's share of each."""
        division = self.world.division
        self.regions = {name: division.regions(name, tensor) for name, tensor in parameters.items()}
        self.shapes = {name: local(tensor).shape for name, tensor in parameters.items()}
        self.first = {name for name, tensor in parameters.items() if division.is_first(name, tensor)}

    def _write(self, snapshot: Snapshot) -> int:
        path, groups = self.path(snapshot.step), self._groups(snapshot)
        if not self.world.is_main:
            fresh = self._say(None)
            if fresh is None:
                raise UserError(path, "the first rank could not begin a checkpoint", "Its own message says why.")
            self._fill(path.with_name(fresh), snapshot)
            return snapshot.step
        begun = False

        def state(fresh: Path) -> None:
            nonlocal begun
            write_head(fresh, snapshot.weights)
            (fresh / "state").mkdir()
            for group, entries in groups.items():
                holes = [(name, dtype, shape, lambda: None) for name, (dtype, shape) in entries.items()]
                tensor_file.write(fresh / "state" / f"{group}.safetensors", holes)
            (fresh / "state" / "run.json").write_text(json.dumps(snapshot.numbers, indent=1))
            begun = True
            self._say(fresh.name)
            self._fill(fresh, snapshot)

        size = sum(prod(shape) * dtype.itemsize for entries in groups.values() for dtype, shape in entries.values())
        config, dtype, files, life = snapshot.config, snapshot.dtype, snapshot.files, snapshot.life
        try:
            directory.write(path, config, lambda place: None, dtype, files, life, also=state, also_bytes=size)
        except BaseException:
            if not begun:
                self._say(None)  # the others wait for a name
            raise
        self._publish(path)
        self._prune()
        return snapshot.step

    def _say(self, fresh: str | None) -> str | None:
        """The first rank's word to the others: what the directory that is being written is called."""
        said: str | None = self.world.mesh.collect(fresh, self.world.mesh.writers)[0]
        return said

    def _groups(self, snapshot: Snapshot) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """What the state's files hold, in terms of whole tensors: of all ranks together."""
        shapes = self.world.division.shapes
        own: dict[str, dict[str, tuple[str, list[int]]]] = defaultdict(dict)
        for group, tensors in snapshot.tensors.items():
            for name, tensor in tensors.items():
                whole = shapes[parameter_of(name)] if tensor.dim() else ()
                own[group][name] = str(tensor.dtype).removeprefix("torch."), list(whole)
        found: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = defaultdict(dict)
        for said in self.world.mesh.collect(own, self.world.mesh.writers):
            for group, entries in said.items():
                for name, (dtype, shape) in entries.items():
                    found[group][name] = getattr(torch, dtype), tuple(shape)
        return found

    def _fill(self, fresh: Path, snapshot: Snapshot) -> None:
        """This rank's boxes of all files, on disk; returns when every rank's are."""
        _, _, places = directory.written_places(snapshot.config, snapshot.dtype)
        of: dict[str, list[Place]] = defaultdict(list)
        for place in places:
            of[place.parameter].append(place)
        files = [(file, TensorFile(file)) for file in sorted(fresh.glob("*.safetensors")) if "head" not in file.name]
        where = {name: (file, stored) for file, opened in files for name, stored in opened.tensors.items()}
        with _Handles() as handles:
            for name, tensor in snapshot.weights.items():
                if name not in self.first:
                    continue
                for place, box, here in boxes_to_write(of[name], name, self.regions[name]):
                    file, stored = where[place.name]
                    tensor_file.fill_box(handles(file), stored, box, tensor[here])
            for group, tensors in snapshot.tensors.items():
                file = fresh / "state" / f"{group}.safetensors"
                opened = TensorFile(file, integers=True)
                for name, tensor in tensors.items():
                    parameter = parameter_of(name)
                    if parameter in self.first or (parameter not in self.regions and self.world.is_main):
                        for region in self.regions[parameter] if tensor.dim() else [Region((), ())]:
                            tensor_file.fill_box(handles(file), opened.tensors[name], region.whole, tensor[region.here])
        self.world.mesh.collect("written", self.world.mesh.writers)

    def read(self, step: int) -> tuple[dict[str, Any], Callable[[str], dict[str, Tensor]]]:
        """As of one process, but of every tensor only what this rank holds."""
        numbers, _ = super().read(step)
        shapes = self.world.division.shapes

        def group(name: str) -> dict[str, Tensor]:
            file = self.path(step) / "state" / f"{name}.safetensors"
            if not file.exists():
                return {}
            opened = TensorFile(file, integers=True)
            found = {}
            for key, stored in opened.tensors.items():
                parameter = parameter_of(key)
                if parameter not in shapes:  # a number of the whole run
                    found[key] = opened.tensor(key)
                elif parameter in self.regions:
                    found[key] = self._share(opened, key, parameter) if stored.shape else opened.tensor(key)
            return found

        return numbers, group

    def _share(self, opened: TensorFile, key: str, parameter: str) -> Tensor:
        share = torch.zeros(self.shapes[parameter], dtype=opened.tensors[key].dtype)
        for region in self.regions[parameter]:
            rows, *columns = region.whole
            share[region.here] = opened.tensor(key, (rows,))[(slice(None), *columns)]
        return share


def parameter_of(name: str) -> str:
    """`layers.0.attention.qkv.weight/exp_avg` -> the parameter it is of."""
    return name.partition("/")[0]


class _Handles:
    """Files that are written in, each opened once and flushed at the end."""

    def __enter__(self) -> Callable[[Path], int]:
        self.open: dict[Path, int] = {}
        return self._handle

    def _handle(self, file: Path) -> int:
        if file not in self.open:
            self.open[file] = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        return self.open[file]

    def __exit__(self, *error: object) -> None:
        for handle in self.open.values():
            os.fsync(handle)
            os.close(handle)
