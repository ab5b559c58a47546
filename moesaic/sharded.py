"""Tensors that are divided among ranks (DTensor): this rank's shard of one, and the whole of it.

Both take any tensor, so that nobody else asks which kind it is.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """What of it lies here: shares its memory."""
    divided = _divided(tensor)
    return tensor if divided is None else divided.to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of it, gathered from the ranks that share it, each of which must ask; also where shares differ in size."""
    divided = _divided(tensor)
    return tensor if divided is None else divided.full_tensor()


def gathered(own: Tensor, like: Tensor) -> Tensor:
    """The whole of what is divided as `like` is, from every rank's own."""
    divided = _divided(like)
    if divided is None:
        return own
    shape, stride = divided.shape, divided.stride()
    made = type(divided).from_local(own, divided.device_mesh, divided.placements, shape=shape, stride=stride)
    return whole(made)


def own_rows(everything: Tensor, like: Tensor) -> Tensor:
    """What of a whole tensor lies here, if it is divided by rows as `like` is."""
    divided = _divided(like)
    if divided is None:
        return everything
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(divided.shape, divided.device_mesh, divided.placements)
    return everything[offset[0] : offset[0] + shape[0]] if shape[0] else everything[:0]


def _divided(tensor: Tensor) -> Any:
    """The tensor, if it is a DTensor. Whoever has made one has imported them; here that would be a fifth of the time in
    which a command starts."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None
