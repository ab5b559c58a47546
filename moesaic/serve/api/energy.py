"""Joules used so far, where the hardware counts them: RAPL for processors, NVML for GPUs. Nothing where it does not."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


@dataclass
class Zone:
    """A processor's counter of microjoules, which starts again from 0 at `size`."""

    name: str
    file: Path
    size: int
    last: int
    turns: int = 0

    def joules(self) -> float:
        now = int(self.file.read_text())
        if now < self.last:
            self.turns += 1
        self.last = now
        return (now + self.turns * self.size) / 1e6


@dataclass
class Energy:
    """`read` gives joules by device. Zones below a package's are part of it and left out."""

    folder: Path = RAPL
    zones: list[Zone] = field(init=False)
    nvml: Any = field(init=False, default=None)
    gpus: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.zones = []
        for place in sorted(self.folder.glob("*-rapl:*")):
            if place.name.count(":") > 1:
                continue
            try:
                name = (place / "name").read_text().strip()
                size = int((place / "max_energy_range_uj").read_text())
                file = place / "energy_uj"
                self.zones.append(Zone(name, file, size, int(file.read_text())))
            except (OSError, ValueError):  # often only root may read them
                continue
        self._find_gpus()

    def read(self) -> dict[str, float]:
        found = {}
        for zone in self.zones:
            try:
                found[zone.name] = zone.joules()
            except (OSError, ValueError):
                continue
        for number, gpu in enumerate(self.gpus):
            millijoules = ctypes.c_ulonglong()
            if self.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules)) == 0:
                found[f"gpu-{number}"] = millijoules.value / 1e3
        return found

    def _find_gpus(self) -> None:
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if self.nvml.nvmlInit_v2() != 0:
                return
        except (OSError, AttributeError):
            return
        count = ctypes.c_uint()
        self.nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for number in range(count.value):
            gpu = ctypes.c_void_p()
            if self.nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu)) == 0:
                self.gpus.append(gpu)
