"""The KV cache's dtype, and how many of its pages fit in memory."""

from __future__ import annotations

import os

import torch

from moesaic.errors import UserError
from moesaic.model.transformer import Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
KEPT = 16  # states of prefixes beside those of requests
SHARE = 0.25  # of the free memory, by default


def dtype_of_cache(model: Model, name: str | None) -> torch.dtype:
    """The model's own by default."""
    if name is None:
        return model.dtype
    if name not in DTYPES:
        raise UserError("--cache-dtype", f'there is no "{name}"', f"Take {', '.join(DTYPES)}.")
    if name == "float8" and model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < (8, 9):
        raise UserError("--cache-dtype", "this GPU has no float8", "Leave it out.")
    return DTYPES[name]


def pages_that_fit(
    model: Model,
    cache_bytes: int | None,
    page_size: int,
    max_requests: int,
    dtype: torch.dtype | None = None,
    states: int = 0,
) -> int:
    """Never more than `max_requests` requests could fill, of what so many states leave."""
    size = page_bytes(model, page_size, dtype or model.dtype)
    useful = max_requests * -(-model.config.context // page_size)
    budget = budget_of(model, cache_bytes) - states * model.state_bytes
    pages = min(useful, budget // size) if size else useful  # of layers that all keep states, pages hold nothing
    if pages < 1:
        raise UserError("cache_bytes", f"{budget} bytes hold no page of {size} bytes", "Give the cache more memory.")
    return int(pages)


def states_that_fit(
    model: Model, cache_bytes: int | None, max_requests: int, reuse_prefixes: bool = False
) -> tuple[int, int]:
    """How many requests can run at once: all, where layers keep no states of sequences; else as many as have room for
    theirs in half of the memory, so that the other half is left for pages. And how many states there are: some more are
    of prefixes, where there is room for them."""
    size = model.state_bytes
    if not size:
        return max_requests, 0
    fitting = budget_of(model, cache_bytes) // 2 // size
    if fitting < 1:
        problem = f"half of {budget_of(model, cache_bytes)} bytes does not hold the state of a sequence, {size} bytes"
        raise UserError("cache_bytes", problem, "Give the cache more memory.")
    return min(max_requests, fitting), min(max_requests + (KEPT if reuse_prefixes else 0), fitting)


def budget_of(model: Model, cache_bytes: int | None) -> int:
    return cache_bytes if cache_bytes is not None else int(free_bytes(model.device) * SHARE)


def page_bytes(model: Model, page_size: int, dtype: torch.dtype) -> int:
    """Of one page, in all layers."""
    numbers = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values())
    return numbers * dtype.itemsize * page_size


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not on every system
        return 4 << 30
