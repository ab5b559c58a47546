"""What a rank does to stay up, in one object that `Ranks` holds: what it is doing is known to the others, a failed
collective ends in words, and what a run that was cut off left behind is found."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store, _world

from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.options import ParallelOptions
from moesaic.parallel.staying_up.flows import group_name
from moesaic.parallel.staying_up.nonfinite import Gradients, explain, look, own_word
from moesaic.parallel.staying_up.recovery import MARK, last_sign, note_recovery
from moesaic.parallel.staying_up.redundancy import Redundancy
from moesaic.parallel.staying_up.timings import Timings
from moesaic.parallel.staying_up.watch import Watch, first_line
from moesaic.phases import phase

FAILED = ("gloo", "nccl", "connection reset", "connection closed", "timed out waiting")  # in what a collective says


class Upkeep:
    def __init__(self, mesh: ParallelMesh, options: ParallelOptions) -> None:
        self.mesh, self.options, self.activity = mesh, options, mesh.activity
        self.watch: Watch | None = None
        self.cut_off: float | None = None  # when an earlier attempt at this run gave its last sign
        self.redundancy: Redundancy | None = None
        self.timings: Timings | None = None
        self.own_loss: Tensor | None = None  # of this rank, in this step
        self._gradients: list[Gradients] = []  # of the steps that are not looked into yet
        self._mark = Path()
        self._run = ""  # a name that all attempts at a run share

    @contextmanager
    def watched(self, out: Path, signs: Sequence[str], events: str) -> Iterator[None]:
        """As long as a run in `out` lasts. `signs` are files that it writes as it goes."""
        mark = self._mark = out / MARK
        if self.mesh.is_main and mark.exists():
            self._run, self.cut_off = mark.read_text(), last_sign(out, signs)

        def beat() -> None:
            if self.mesh.is_main and mark.exists():
                mark.touch()

        self.watch = Watch(
            self.activity, _get_default_store(), self.mesh.rank, self.mesh.ranks, collectives_begun,
            self.options.timeout, out / events, beat,
        )  # fmt: skip
        self.watch.start()
        try:
            if self.options.trace:
                self.timings = Timings(self.mesh, out, self.options.trace_every)
            self._run, self.cut_off = self.mesh.collect([self._run or secrets.token_hex(8), self.cut_off])[0]
            if self.options.redundancy:
                here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                distance = here if here < self.mesh.ranks else 1  # to the next machine, if there is one
                self.redundancy = Redundancy(self.mesh, self._folder(out), self._run, distance)
            with self.timings.flows if self.timings is not None else nullcontext():
                yield
            if self.timings is not None:
                self.timings.write()
        except Exception as error:
            why = self.watch.lost(error) if is_collective_failure(error) else ""
            self.activity.enter("ending")  # which has its bound too: a thread may wait for the others
            if why:
                raise ConnectionError(errno.ECONNABORTED, why) from error
            raise
        else:
            if self.redundancy is not None:
                self.redundancy.close()
            self.watch.stop()
            if self.mesh.is_main:
                mark.unlink(missing_ok=True)

    def _folder(self, out: Path) -> Path:
        """Where a machine keeps copies of this run's state."""
        given, memory = self.options.redundancy_folder, Path("/dev/shm")
        place = Path(given) if given else memory if memory.is_dir() else Path(tempfile.gettempdir())
        run = hashlib.blake2b(str(out.resolve()).encode(), digest_size=8).hexdigest()
        return place / f"moesaic-{os.getuid()}-{run}"

    @contextmanager
    def doing(self, operation: str, *, step: int | None = None, patient: bool = False, **facts: Any) -> Iterator[None]:
        if step is not None:
            self.activity.step = step
        timed = self.timings.operation(operation, self.activity.step, **facts) if self.timings is not None else None
        with timed or nullcontext(), self.activity.doing(operation, patient=patient), phase(operation):
            yield

    def after_step(self, model: nn.Module, note: Callable[..., None]) -> None:
        """Say why a step was skipped, and every few steps who was slow."""
        late = self.mesh.device.type != "cpu"  # there a norm is read a step later, when it has long been there
        while len(self._gradients) > late:
            found = self._gradients.pop(0)
            if not bool(found.norm.isfinite()):
                text, facts = explain(self.mesh.collect(own_word(found, model)))
                note(f"step {found.step:,} was skipped: {text}", kind="nonfinite", of=found.step, **facts)
        if self.timings is not None:
            self.timings.after_step(note)

    def look_at_gradients(self, model: nn.Module, norm: Tensor) -> None:
        self._gradients.append(look(model, norm, self.activity.step, self.own_loss))

    def resumed(self, step: int, again: int, note: Callable[..., None]) -> None:
        """A run that goes on where another was cut off says how long that took."""
        if self.mesh.is_main:
            self._mark.write_text(self._run)
        note_recovery(self.cut_off, step, again, note)


def collectives_begun() -> dict[str, int]:
    """Of every group that this rank is in, how many collectives it has begun. It only reads numbers."""
    found: dict[str, int] = {}
    for group in list(_world.pg_map):
        if dist.get_world_size(group) > 1:
            key = group_name(group)
            with suppress(RuntimeError):  # a backend that does not count
                found[key] = found.get(key, 0) + group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return found


def is_collective_failure(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in first_line(error).lower() for word in FAILED)
