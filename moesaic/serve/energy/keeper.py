"""Holds the clocks of some GPUs, in a process of its own: sets those it is told, and gives them back to the driver.

    python -m moesaic.serve.energy.keeper GPU-UUID ...        clocks in MHz on its input, one a line

A locked clock outlives the process that locked it. So whoever unlocks it must outlive the engine, however that ends:
when the input is closed, by the engine or by its death, clocks are reset, and this process ends.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

REMEDY = "The clocks of a GPU are root's to lock; in a container, also CAP_SYS_ADMIN."


def main(uuids: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the server
        signal.signal(number, signal.SIG_IGN)
    try:
        import pynvml as nvml
    except ImportError:
        return say(problem="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        clocks = set.intersection(*(supported(nvml, handle) for handle in handles))
    except nvml.NVMLError as error:
        return say(problem=f"NVML: {error}")
    try:
        lock(nvml, handles, max(clocks))
        say(clocks=sorted(clocks))
        for line in sys.stdin:
            lock(nvml, handles, int(line))
    except nvml.NVMLError as error:
        say(problem=f"NVML: {error}. {REMEDY}")
    finally:
        for handle in handles:
            try:
                nvml.nvmlDeviceResetGpuLockedClocks(handle)
            except nvml.NVMLError as error:
                say(problem=f"a clock could not be reset: {error}")
        nvml.nvmlShutdown()


def supported(nvml: Any, handle: Any) -> set[int]:
    """Graphics clocks at the memory's highest."""
    memory = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
    return set(nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory))


def lock(nvml: Any, handles: list[Any], clock: int) -> None:
    for handle in handles:
        nvml.nvmlDeviceSetGpuLockedClocks(handle, clock, clock)


def say(**what: Any) -> None:
    try:
        print(json.dumps(what), flush=True)
    except BrokenPipeError:  # there is nobody left to hear it
        sys.stdout = sys.stderr


if __name__ == "__main__":
    main(sys.argv[1:])
