"""Start a kernel while the one before it is still running (programmatic dependent launch, Hopper and later).

A kernel so launched may read weights at once, and must wait (`gdc_wait`) before it reads what others wrote or writes
what others read. Every such kernel waits, so when one has finished, all before it have; but when one has merely begun,
those before its predecessor may still be running, unless the predecessor waited before it let the next one start. What
was there before the first of a row of such kernels began (a plain kernel came before it) may be read at any time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from functools import cache

import torch

from moesaic.kernels.triton.launch import launch


@cache
def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether there are its instructions, and as much shared memory: what came after it has others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_pdl(kernel, grid: tuple[int, ...], *arguments, PDL: bool, **options) -> None:
    early = {"launch_pdl": True} if PDL else {}
    launch(kernel, grid, *arguments, PDL=PDL, **options, **early)
