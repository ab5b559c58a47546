"""Whom a run works with: nobody (`World`), or the other ranks of a mesh (`moesaic.parallel.ranks.Ranks`). A run asks it
wherever ranks must agree, and does not know how many there are."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.kernels.interface import Mode
from moesaic.model import directory
from moesaic.model.config import ModelConfig
from moesaic.model.context import Routing
from moesaic.model.formats.checkpoint import Source
from moesaic.model.transformer import Model
from moesaic.model.value_head import read_head
from moesaic.parallel.staying_up.recovery import MARK, last_sign, note_recovery
from moesaic.phases import phase

if TYPE_CHECKING:
    from moesaic.parallel.pipeline.schedule import Pipeline
    from moesaic.parallel.staying_up.redundancy import Redundancy


def launched() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


class World:
    """One process."""

    ranks = data_ranks = 1
    rank = data_rank = 0
    row_ranks = 1  # ranks that divide the rows of one batch among them
    is_main = True
    data_group: dist.ProcessGroup | None = None  # ranks that see other sequences
    pipeline: Pipeline | None = None  # how a step is taken, where layers lie on several ranks

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def build(self, config: ModelConfig, dtype: torch.dtype, weights: Source | int, mode: Mode = "fast") -> Model:
        """A model with the weights of a directory, or fresh ones of a seed."""
        if isinstance(weights, int):
            return Model(config, mode).initialize(weights).to(self.device, dtype)
        model = directory.load(weights.place, dtype=dtype, device=self.device)
        model.mode = mode
        return model

    def copy(self, model: Model) -> Model:
        """Another one with the same weights, on the same ranks."""
        return copy.deepcopy(model)

    def whole_tensors(self, model: Model) -> Iterator[tuple[str, Tensor]]:
        """All of its weights by name, one after the other, so that nobody must hold them all. Every rank goes through
        them; what the first finds is for use."""
        yield from model.state_dict().items()

    def barrier(self) -> None: ...

    # -- staying up

    cut_off: float | None = None  # when an earlier attempt at this run, by several ranks, gave its last sign

    @property
    def restarted(self) -> bool:
        return self.cut_off is not None

    def watched(self, out: Path, signs: Sequence[str], events: str) -> AbstractContextManager[None]:
        """As long as a run in a directory lasts: a rank that holds the others up ends it, in words. `signs` and
        `events` are files that it writes there."""
        return self._alone(out, signs)

    @contextmanager
    def _alone(self, out: Path, signs: Sequence[str]) -> Iterator[None]:
        self.cut_off = last_sign(out, signs)
        yield
        (out / MARK).unlink(missing_ok=True)

    def doing(
        self, operation: str, *, step: int | None = None, patient: bool = False, **facts: Any
    ) -> AbstractContextManager[None]:
        """What this process does next, a phase of its step; `patient` may take as long as it takes."""
        return phase(operation)

    @property
    def redundancy(self) -> Redundancy | None:
        """Copies of this rank's state in its own memory and its neighbour's."""
        return None

    def after_step(self, model: nn.Module, note: Callable[..., None]) -> None:
        """When a step is logged: what ranks have to say of it."""

    def resumed(self, step: int, again: int, note: Callable[..., None]) -> None:
        """Before the first step, when `step` are done and `again` are lost: say what it took to get here."""
        note_recovery(self.cut_off, step, again, note)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def add_up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars of all ranks together: sums, and of what ends in _max the largest."""
        return dict(values)

    def total(self, values_N: Tensor) -> Tensor:
        """Of the ranks that train on other sequences, on each of them; the values lie on the host."""
        return values_N

    def from_main(self, values_N: Tensor) -> Tensor:
        """The first rank's values, on every rank; they lie on the host."""
        return values_N

    def collect(self, value: Any) -> list[Any]:
        """What every rank says (JSON), in their order."""
        return [value]

    def add_up_counts(self, counts_N: Tensor) -> Tensor:
        """Of tokens, over the ranks that train on others."""
        return counts_N

    def all_loads(self, loads: dict[int, Tensor]) -> dict[int, Tensor]:
        """Tokens of each expert by layer, with the layers of other pipeline stages."""
        return loads

    def whole_routing(self, routing: Routing) -> Routing:
        """Of all rows of the batch, for losses over whole sequences that every rank then computes alike."""
        return routing

    def reduce_gradients(self, model: nn.Module) -> None:
        """After the last backward of a step."""

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """While an engine or another calls parts of the model, and not the whole."""
        yield

    @contextmanager
    def generating(self, model: Model) -> Iterator[None]:
        """While the engine of every rank completes prompts of its own with the weights of now."""
        yield

    def norm(self, model: nn.Module) -> Tensor:
        """Of all gradients of all ranks, each element counted once."""
        raise NotImplementedError

    def load(self, model: Model, place: Path) -> None:
        """Another directory's weights into a model; of one with an adapter, what is trained of it."""
        if model.lora is None:
            model.load_state_dict(directory.load(place, dtype=model.dtype, device=self.device).state_dict())
            return
        model.lora.restore(place)
        if model.value is not None and (head := read_head(place, model.config.hidden, self.device)) is not None:
            model.value.load_state_dict(head.state_dict())
