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


def _divided(tensor: Tensor) -> Any:
    """The tensor, if it is a DTensor. Whoever has made one has imported them; here that would be a fifth of the time in
    which a command starts."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None
