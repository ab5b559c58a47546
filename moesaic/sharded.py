"""Tensors that are divided among ranks (DTensor): this rank's shard of one, and the whole of it.

Both take any tensor, so that nobody else asks which kind it is.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What of it lies here: shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, gathered from the ranks that share it, each of which must ask; also where shares differ in size."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
