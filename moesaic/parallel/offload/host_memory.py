"""Where offloaded state is: in the host's memory, or in memory-mapped files on an NVMe disk (ZeRO-Infinity)."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import UserError


class HostMemory:
    """With a folder, a tensor is a file there, mapped into memory.

    A file has no name any more once it is mapped: its space is free again when the process ends, however it ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._maps: dict[int, mmap.mmap] = {}  # by the address of their tensors
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(folder, f"cannot hold offloaded state: {error.strerror}") from None

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous copy of this type, wherever the tensor is."""
        if self.folder is None or not tensor.numel():
            return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        return self._mapped(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape).copy_(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor of the host that is the caller's no longer. Scalars stay in memory."""
        return tensor if self.folder is None or tensor.dim() == 0 else self.copy(tensor, tensor.dtype)

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        """Have the disk read them while something else is computed."""
        for tensor in tensors:
            mapped = self._maps.get(tensor.data_ptr())
            if mapped is not None and hasattr(mmap, "MADV_WILLNEED"):
                mapped.madvise(mmap.MADV_WILLNEED)

    def _mapped(self, size: int) -> Tensor:
        assert self.folder is not None
        with tempfile.TemporaryFile(dir=self.folder) as file:
            try:
                if hasattr(os, "posix_fallocate"):  # a full disk is an error now, and not a signal at the first write
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    os.truncate(file.fileno(), size)
            except OSError as error:
                problem = f"no space for {size / 2**30:.1f} GiB of offloaded state ({error.strerror})"
                raise UserError(self.folder, problem, "Free some, or name another folder.") from None
            mapped = mmap.mmap(file.fileno(), size)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self._maps[tensor.data_ptr()] = mapped
        return tensor
