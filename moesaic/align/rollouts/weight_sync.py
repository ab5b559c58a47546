"""Weight synchronisation: how the engines that sample rollouts come to have the trainer's newest weights.

    SharedWeights   the engine holds the trainer's own parameters: an update is a new version number, and no copy
    CopiedWeights   rollout workers on Ray: one block of bytes (safetensors) through Ray's object store. Workers on the
                    trainer's machine read it from shared memory, others over the network; nobody restarts, and
                    nothing touches a disk

Whatever is cached of older weights is no longer shared once a version is pushed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from safetensors.torch import load, save

from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine


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

    def publish(self, version: int, weights: np.ndarray) -> None: ...


class CopiedWeights(WeightSync):
    def __init__(self, workers: Publisher) -> None:
        self.workers = workers

    def push(self, model: Model, version: int) -> None:
        self.workers.publish(version, packed(model))


def packed(model: Model) -> np.ndarray:
    """As an array, because Ray hands arrays over without copying them."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in model.state_dict().items()}
    return np.frombuffer(save(tensors), np.uint8)


def receive(engine: Engine, weights: np.ndarray, version: int, recompute: bool) -> None:
    """The other end of `CopiedWeights`. In place, so that whoever holds the model goes on with it; requests in flight
    compute their keys and values again, or keep those of the old weights."""
    engine.model.load_state_dict(load(weights.tobytes()))
    engine.version = version - 1
    engine.weights_changed(recompute=recompute)
