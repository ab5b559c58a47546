"""Weight synchronisation: how the engines that sample rollouts come to have the trainer's newest weights.

    SharedWeights   the engine holds the trainer's own parameters: an update is a new version number, and no copy
    CopiedWeights   rollout workers on Ray: blocks of bytes (safetensors) through Ray's object store. Workers on the
                    trainer's machine read them from shared memory, others over the network; nobody restarts, and
                    nothing touches a disk. Of a model that lies on several ranks, one tensor at a time is brought
                    together, and the first rank holds no more than a block

Whatever is cached of older weights is no longer shared once a version is pushed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.serve.core.engine import Engine

BLOCK_BYTES = 64 << 20  # of weights that are handed over together; a tensor may be larger


class WeightSync(ABC):
    @abstractmethod
    def push(self, model: Model, version: int) -> None:
        """From now on rollouts are sampled from the weights that `model` has now, called `version`."""


class SharedWeights(WeightSync):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def push(self, model: Model, version: int) -> None:
        assert self.engine.model is model
        self.engine.version = version - 1
        self.engine.weights_changed()


class Publisher(Protocol):
    """Rollout workers: `publish` hands a version's weights to all of them."""

    def publish(self, version: int, blocks: Iterable[np.ndarray]) -> None: ...


class CopiedWeights(WeightSync):
    """`workers` are known to the first rank, and None to the others."""

    def __init__(self, workers: Publisher | None, world: World) -> None:
        self.workers, self.world = workers, world

    def push(self, model: Model, version: int) -> None:
        tensors = self.world.whole_tensors(model)
        if self.workers is not None:
            self.workers.publish(version, packed(tensors))
        else:
            for _ in tensors:  # its own share of each was handed over
                pass


def packed(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[np.ndarray]:
    """As arrays, because Ray hands arrays over without copying them."""
    block: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if block and sum(one.nbytes for one in block.values()) + tensor.nbytes > BLOCK_BYTES:
            yield np.frombuffer(save(block), np.uint8)
            block = {}
        block[name] = tensor.detach().to("cpu").contiguous()
    yield np.frombuffer(save(block), np.uint8)


def receive(engine: Engine, blocks: Iterable[np.ndarray], version: int, recompute: bool) -> None:
    """The other end of `CopiedWeights`. In place, so that whoever holds the model goes on with it; requests in flight
    compute their keys and values again, or keep those of the old weights."""
    missing = engine.model.state_dict()
    for block in blocks:
        for name, tensor in load(block.tobytes()).items():
            missing.pop(name).copy_(tensor)
    assert not missing
    engine.version = version - 1
    engine.weights_changed(recompute=recompute)
