"""Host memory in which weights wait for a GPU: pinned, so that the GPU copies from it by itself, beside its work.

PyTorch's own pinned memory comes in powers of two, up to twice what was asked for. Here pages are taken from the system
in large pages, and pinned where they are.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from math import prod

import torch
from torch import Tensor

from moesaic.errors import UserError


class _Pages(mmap.mmap):
    """Pages of the host that are given back when no tensor lies in them any more."""

    pinned = 0  # the address, once a GPU knows them

    def pin(self, address: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        self.pinned = 0 if code else address
        return code

    def __del__(self) -> None:
        if self.pinned and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.pinned)


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Zeros that take no memory before they are written, unless pinned."""
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        problem = f"there are no {size / 2**30:.1f} GiB for offloaded weights ({error.strerror})"
        raise UserError("host memory", problem, "Offload to disk, or use a machine with more memory.") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        tensor.zero_()  # by all cores, which get pages sooner than whoever pins them
    if pinned and (code := pages.pin(tensor.data_ptr())):
        problem = f"{size / 2**30:.1f} GiB cannot be pinned (CUDA error {code})"
        raise UserError("host memory", problem, "Free some memory, or raise the limit of locked memory (ulimit -l).")
    return tensor.view(dtype).view(shape)
