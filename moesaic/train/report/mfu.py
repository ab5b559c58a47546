"""Model FLOPs utilization (MFU): the FLOPs a training step needs, against the matmul throughput of this machine.

    share = training_flops(config, lengths) / seconds / peak_flops(device, torch.bfloat16)      # model/flops.py

Counted is what the model needs (forward once, backward twice), not what was spent: recomputed activations, idle experts
and dropped tokens do not raise it.
"""

from __future__ import annotations

import time
from functools import cache

import torch


@cache
def peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of the best of a few large square matmuls: measured once per process, and what MFU is a share of."""
    size, largest = (8192, 8192) if device.type == "cuda" else (128, 1024)
    best = _fastest(device, dtype, size, 0.0)
    # A processor that has no instructions for a dtype takes hundreds of times as long: such are judged by small ones.
    while size < largest and 8 * best < seconds:
        size *= 2
        best = _fastest(device, dtype, size, 0.0)
    return 2.0 * size**3 / min(best, _fastest(device, dtype, size, seconds))


def _fastest(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """The shortest time of some matmuls, at least one."""
    a = torch.randn(size, size, device=device, dtype=torch.float32, generator=_generator(device)).to(dtype)
    out = torch.empty_like(a)

    def matmul() -> float:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    matmul()  # the first one also chooses kernels and takes memory
    end = time.perf_counter() + seconds
    best = matmul()
    while time.perf_counter() < end:
        best = min(best, matmul())
    return best


def _generator(device: torch.device) -> torch.Generator:
    """A generator of its own: measuring must not change the run's random numbers."""
    return torch.Generator(device=device).manual_seed(0)
