"""After every step each rank's state lies in two memories: its own and its neighbour's (after Bamboo's redundancy).

Bamboo's nodes hold their neighbour's layers and compute with them; here the neighbour holds a copy of the numbers,
which fits any division of a model. Copies are memory-mapped files on each machine, by default in its shared memory, so
they outlive the processes, which a launcher starts all anew when one dies:

    FOLDER/holder-3/owner-2.0.tensors, owner-2.0.json      what rank 3 holds of rank 2; slots 0 and 1 take turns

A run that is cut off goes on from the newest step of which every rank's state is found in one memory or the other.

- A process dies: no step is lost. A rank begins the next step once all have their own copy of the last.
- A machine dies, and a new one takes its place: its ranks' state comes from their neighbours. Copies travel while the
  next step computes, so at most one step is lost. The neighbour is `distance` ranks on: as many as a machine has.
- All memories are lost, or the layout is another: the last checkpoint it is.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.parallel.mesh import PATIENCE, ParallelMesh
from moesaic.units import readable_bytes

ALIGN = 64  # bytes: any type's view begins at a multiple of it
Groups = dict[str, dict[str, Tensor]]


@dataclass
class Copy:
    """A file of tensors, and beside it what it holds: a copy counts only once that is there."""

    file: Path

    @property
    def header(self) -> Path:
        return self.file.with_suffix(".json")

    def body(self, size: int) -> Tensor:
        """Its bytes, which are the file's."""
        with self.file.open("ab") as opened:
            opened.truncate(size)
        return torch.from_file(str(self.file), shared=True, size=size, dtype=torch.uint8)

    def void(self) -> None:
        self.header.unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        try:
            return dict(read_json(self.header))
        except UserError:
            return None


class Redundancy:
    """`run` names the run: copies of another in the same folder are not its own."""

    def __init__(self, mesh: ParallelMesh, folder: Path, run: str, distance: int = 1) -> None:
        self.mesh, self.folder, self.run = mesh, folder, run
        self.layout = str(mesh.layout)
        self.to = (mesh.rank + distance) % mesh.ranks
        self.held = (mesh.rank - distance) % mesh.ranks
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="redundancy")
        self.sent_bytes = 0  # to the neighbour, so far
        self._table: list[list[tuple[int, int, str]]] = []  # of every rank: owner, step and file that it can read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redundancy")
        self._sending: Future[None] | None = None

    def place(self, owner: int, step: int) -> Copy:
        return Copy(self.folder / f"holder-{self.mesh.rank}" / f"owner-{owner}.{step % 2}.tensors")

    # -- every step

    def keep(self, step: int, numbers: dict[str, Any], groups: Groups) -> int:
        """Copy this rank's state after a step; returns its size when every rank has copied its own. The neighbour gets
        it while training goes on."""
        self.wait()
        entries, size = _plan(groups)
        own = self.place(self.mesh.rank, step)
        if not own.file.exists():
            self._check_room(size)
        own.void()
        body = own.body(size)
        for group, name, dtype, shape, start in entries:
            _view(body, dtype, shape, start).copy_(groups[group][name])
        about = {"run": self.run, "layout": self.layout, "owner": self.mesh.rank, "step": step, "size": size,
                 "numbers": numbers, "tensors": entries}  # fmt: skip
        header = json.dumps(about).encode()
        atomic.write_bytes(own.header, header)
        dist.barrier(group=self.group)
        self._sending = self._thread.submit(self._exchange, step, header, body)
        return size

    def _exchange(self, step: int, header: bytes, body: Tensor) -> None:
        copy = self.place(self.held, step)
        copy.void()
        sending = [dist.isend(part, self.to, group=self.group) for part in _parcel(header, body)]
        received = self._receive(self.held, copy)
        for work in sending:
            assert work is not None
            work.wait()
        atomic.write_bytes(copy.header, received)
        self.sent_bytes += len(header) + len(body)

    def _receive(self, source: int, copy: Copy) -> bytes:
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, source, group=self.group)
        header = torch.empty(int(sizes[0]), dtype=torch.uint8)
        dist.recv(header, source, group=self.group)
        dist.recv(copy.body(int(sizes[1])), source, group=self.group)
        return header.numpy().tobytes()

    def wait(self) -> None:
        """Until the neighbour has its copy."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result()

    def _check_room(self, size: int) -> None:
        self.place(0, 0).file.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < 4 * size:  # this rank's and its neighbour's, two of each
            needs = (
                f"needs {readable_bytes(4 * size)} for each rank in {self.folder}, and {readable_bytes(free)} are free"
            )
            raise UserError("parallel.redundancy", needs, "Name another parallel.redundancy_folder, or leave it out.")

    # -- after a restart

    def newest(self) -> int:
        """The last step of which the state of all ranks is found; 0 if there is none. All ranks must ask."""
        found: list[tuple[int, int, str]] = []
        for header in sorted(self.folder.glob("holder-*/owner-*.json")):
            about = Copy(header.with_suffix(".tensors")).read()
            if about is not None and (about["run"], about["layout"]) == (self.run, self.layout):
                found.append((about["owner"], about["step"], str(header.with_suffix(".tensors"))))
        self._table = self.mesh.collect(found)
        steps = [
            {step for rows in self._table for of, step, _ in rows if of == rank} for rank in range(self.mesh.ranks)
        ]
        return max(set.intersection(*steps), default=0)

    def read(self, step: int) -> tuple[dict[str, Any], Groups]:
        """This rank's state after the step that `newest` found, from its own memory or from whoever has it."""
        for owner in range(self.mesh.ranks):
            holders = [rank for rank, rows in enumerate(self._table) if self._file(rows, owner, step)]
            if owner in holders:
                continue
            if self.mesh.rank == holders[0]:
                copy = Copy(Path(self._file(self._table[self.mesh.rank], owner, step)))
                about = copy.read()
                assert about is not None
                for part in _parcel(copy.header.read_bytes(), copy.body(about["size"])):
                    dist.send(part, owner, group=self.group)
            elif self.mesh.rank == owner:
                fresh = self.place(owner, step)
                fresh.file.parent.mkdir(parents=True, exist_ok=True)
                fresh.void()
                atomic.write_bytes(fresh.header, self._receive(holders[0], fresh))
        file = self._file(self._table[self.mesh.rank], self.mesh.rank, step)
        copy = Copy(Path(file)) if file else self.place(self.mesh.rank, step)
        about = copy.read()
        assert about is not None
        body = copy.body(about["size"])
        groups: Groups = {}
        for group, name, dtype, shape, start in about["tensors"]:
            groups.setdefault(group, {})[name] = _view(body, dtype, shape, start)
        return about["numbers"], groups

    @staticmethod
    def _file(rows: list[tuple[int, int, str]], owner: int, step: int) -> str:
        return next((file for of, at, file in rows if (of, at) == (owner, step)), "")

    def forget(self) -> None:
        """What this rank holds is not to be resumed from."""
        self.wait()
        shutil.rmtree(self.folder / f"holder-{self.mesh.rank}", ignore_errors=True)

    def close(self) -> None:
        """The run has ended: nothing stays behind, nor what another number of ranks has left. All ranks must ask."""
        self.wait()
        self.mesh.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)


def _plan(groups: Groups) -> tuple[list[tuple[str, str, str, list[int], int]], int]:
    """Where each tensor lies in the file, and how long that is."""
    entries, end = [], 0
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            entries.append((group, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
    return entries, max(end, ALIGN)


def _view(body: Tensor, dtype: str, shape: list[int], start: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    return body[start : start + count * kind.itemsize].view(kind).view(shape)


def _parcel(header: bytes, body: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([len(header), len(body)]), torch.frombuffer(bytearray(header), dtype=torch.uint8), body
