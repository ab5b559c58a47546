"""Stands in for NVIDIA's library where a process is given this folder to import from: a file keeps what was set.

FAKE_NVML names that file. With FAKE_NVML_REFUSES set, nobody may lock a clock.
"""

from __future__ import annotations

import os


class NVMLError(Exception):
    pass


def write(*words: object) -> None:
    with open(os.environ["FAKE_NVML"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def nvmlInit() -> None:
    write("init")


def nvmlShutdown() -> None:
    write("shutdown")


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if not uuid.startswith("GPU-"):
        raise NVMLError("Not Found")
    return uuid


def nvmlDeviceGetSupportedMemoryClocks(handle: str) -> list[int]:
    return [2619, 3201]


def nvmlDeviceGetSupportedGraphicsClocks(handle: str, memory: int) -> list[int]:
    assert memory == 3201
    return list(range(1980, 344, -15))


def nvmlDeviceSetGpuLockedClocks(handle: str, low: int, high: int) -> None:
    if os.environ.get("FAKE_NVML_REFUSES"):
        raise NVMLError("Insufficient Permissions")
    assert low == high
    write("lock", handle, high)


def nvmlDeviceResetGpuLockedClocks(handle: str) -> None:
    write("reset", handle)
