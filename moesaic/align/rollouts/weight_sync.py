"""A model's weights as one block of bytes (safetensors), which goes to rollout workers through Ray's object store.

Workers on the trainer's machine read it from shared memory, others over the network; nobody restarts, and nothing
touches a disk.
"""

from __future__ import annotations

import numpy as np
from safetensors.torch import load, save

from moesaic.model.transformer import Model


def packed(model: Model) -> np.ndarray:
    """As an array, because Ray hands arrays over without copying them."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in model.state_dict().items()}
    return np.frombuffer(save(tensors), np.uint8)


def unpack_into(model: Model, block: np.ndarray) -> None:
    """In place, so that whoever holds the model goes on with it."""
    model.load_state_dict(load(block.tobytes()))
