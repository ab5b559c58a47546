"""How many pages of the cache fit in the memory it may use."""

from __future__ import annotations

import os

import torch

from moesaic.errors import UserError
from moesaic.model.transformer import Model

SHARE = 0.25  # of the free memory, where nobody said how much


def pages_that_fit(model: Model, cache_bytes: int | None, page_size: int, most_requests: int) -> int:
    """Never more than all requests could fill together."""
    numbers = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values())
    page_bytes = numbers * model.dtype.itemsize * page_size
    useful = most_requests * -(-model.config.context // page_size)
    budget = cache_bytes if cache_bytes is not None else int(free_bytes(model.device) * SHARE)
    pages = min(useful, budget // page_bytes)
    if pages < 1:
        raise UserError(
            "cache_bytes", f"{budget} bytes hold no page of {page_bytes} bytes", "Give the cache more memory."
        )
    return int(pages)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not on every system
        return 4 << 30
