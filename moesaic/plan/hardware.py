"""Devices and clusters: a catalogue (`hardware.yaml`), a user's own YAML like it, `64xH200` as people write it.

A kind of device has peak rates from its maker and a few measured shares of them; nothing belongs to one model or run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.yaml_reader import read_yaml

CATALOGUE = Path(__file__).with_name("hardware.yaml")
OWN = Path.home() / ".cache" / "moesaic" / "hardware.yaml"  # what `moesaic plan calibrate` measured here
FORMAT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53125, "fp4": 0.5625}


@dataclass(frozen=True)
class Device:
    """One accelerator (or processor) and its links. Seconds, bytes, flops per second, watts, US dollars per hour."""

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    link: float
    network: float
    units: int = 100  # processors that tiles of a matmul are spread over
    domain: int = 8
    power: float = 500.0
    idle_power: float = 80.0
    price: float = 0.0
    matmul: Mapping[str, float] = field(default_factory=lambda: {"default": 0.8})
    k_half: float = 120.0
    wave: float = 0.25  # how much a last, partly filled wave of tiles costs: its share to this power
    memory: float = 0.8
    attention: float = 0.55
    launch: float = 4e-6
    link_share: float = 0.8
    network_share: float = 0.8
    link_latency: float = 8e-6
    network_latency: float = 15e-6
    hidden: float = 0.8  # of communication that is overlapped with computation, how much it really hides
    overlap: tuple[str, ...] = ("tp", "pp", "dp")  # what the training stacks used on this kind overlap
    fused_attention: bool = True
    reduce_bytes: float = 2.0  # per gradient as it travels to the other data-parallel ranks
    mixture_overhead: float = 0.0  # seconds per mixture layer and pass: sorting, counting, waiting for the host
    mixture_launch: float = 0.0  # seconds the host needs to launch one mixture layer's kernels, forward and backward
    step_overhead: float = 0.0  # seconds per training step outside the model: data, logging, synchronisation
    # Power against the clock (energy.py), in MHz and watts; 0: as shares of `power` and `clock` like an H200's.
    clock: float = 0.0  # highest
    lowest_clock: float = 0.0
    sustained_clock: float = 0.0  # that large matmuls run at under the power limit
    knee_clock: float = 0.0  # below it the memory slows down too
    clock_idle_power: float = 0.0  # above `idle_power`, with nothing to do at the highest clock
    core_power: float = 0.0  # of busy tensor cores at the highest clock
    memory_power: float = 0.0  # of the memory at its full bandwidth
    serve_memory: float = 0.9  # share of the bandwidth at which a decode step streams weights
    serve_compute: float = 0.6  # share of the peak that matmuls of a serving step reach
    serve_attention: float = 0.8  # attention's share of both of these
    serve_kernel: float = 6e-6  # seconds from one kernel's start to the next inside a CUDA graph
    serve_reduce: float = 8e-6  # seconds of a small all-reduce among eight devices
    serve_link: float = 0.5  # share of the link's rate in large messages of a step
    sources: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth, self.memory_bytes, self.link, self.network))

    def peak(self, dtype: str) -> float:
        """In formats it lacks a device computes in the next wider one it has."""
        for wider in (dtype, "fp8", "bf16", "fp16", "fp32"):
            if wider in self.flops and (wider == dtype or FORMAT_BYTES[wider] >= FORMAT_BYTES[dtype]):
                return self.flops[wider]
        return max(self.flops.values())

    def sustained(self, dtype: str) -> float:
        """What large matmuls reach."""
        return self.peak(dtype) * self.matmul.get(dtype, self.matmul["default"])


@dataclass(frozen=True)
class Cluster:
    device: Device
    count: int

    @property
    def name(self) -> str:
        return f"{self.count}x{self.device.name.upper()}"

    @property
    def price(self) -> float:
        return self.device.price * self.count


CLOCKS = {"clock", "lowest_clock", "sustained_clock", "knee_clock", "clock_idle_power", "core_power", "memory_power"}
ZERO = {"price", "step_overhead", "mixture_overhead", "mixture_launch", "idle_power", "wave", *CLOCKS}  # may be 0
NUMBERS = {item.name for item in fields(Device) if item.type == "float"} | {"units", "domain"}


def load_device(name: str, own: Path | None = None) -> Device:
    known = {**catalogue(), **(_read(own) if own else {}), **(_read(OWN) if own is None and OWN.is_file() else {})}
    wanted = _canonical(name)
    for key, entry in known.items():
        if wanted in {_canonical(key), *(_canonical(str(other)) for other in entry.get("names", []))}:
            return _device(key, known)
    near = difflib.get_close_matches(wanted, known, 3, 0.4)
    raise UserError(
        f"hardware {name}",
        "no device of this name",
        (f"Did you mean {' or '.join(near)}? " if near else f"Known are {', '.join(known)}. ")
        + "Your own can be described in a YAML file (--hardware FILE; docs/plan.md).",
    )


def load_cluster(text: str, own: Path | None = None) -> Cluster:
    """`64xH200`, `H200` (one) or `2x8xH100` (nodes x devices)."""
    match = re.fullmatch(r"\s*((?:\d+\s*[xX*]\s*)*)([A-Za-z][\w.+ -]*|4090)\s*", text)
    if not match:
        raise UserError(f"--cluster {text}", "not a number of devices", "Write 64xH200: how many, and which.")
    count = 1
    for number in re.findall(r"\d+", match[1]):
        count *= int(number)
    if not 0 < count <= 10_000_000:
        raise UserError(f"--cluster {text}", f"{count} devices are no cluster", "Write 64xH200: how many, and which.")
    return Cluster(load_device(match[2], own), count)


def _canonical(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    return _read(CATALOGUE)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    if not file.is_file():
        raise UserError(file, "no such file", "Give a YAML file of devices (docs/plan.md).")
    raw = read_yaml(file.read_text(), str(file))
    if not isinstance(raw, dict) or not all(isinstance(entry, dict) for entry in raw.values()):
        raise UserError(file, "not a list of devices", "Write `mydevice:` and below it `base: h100` and what differs.")
    return {str(key): entry for key, entry in raw.items()}


def _device(key: str, known: dict[str, dict[str, Any]], depth: int = 0) -> Device:
    entry = dict(known[key])
    place = f"hardware {key}"
    base = entry.pop("base", None)
    entry.pop("names", None)
    if base is not None:
        if base not in known or depth > 8:
            raise UserError(f"{place}: base", f"no device {base}", f"Known are {', '.join(known)}.")
        below = _device(base, known, depth + 1)
        merged = {item.name: getattr(below, item.name) for item in fields(Device)}
        for group in ("flops", "matmul"):
            entry[group] = {**merged[group], **entry.get(group, {})}
        entry = merged | entry
    entry["name"] = key
    unknown = set(entry) - {item.name for item in fields(Device)}
    if unknown:
        raise UserError(f"{place}: {sorted(unknown)[0]}", "unknown key", "docs/plan.md lists what a device has.")
    for name in ("flops", "memory_bytes", "bandwidth", "link", "network"):
        if name not in entry:
            raise UserError(f"{place}: {name}", "is missing", "Or say `base: h100` and only what differs.")
    for name, value in entry.items():
        if name in NUMBERS:
            entry[name] = _positive(
                value,
                f"{place}: {name}",
                zero=name in ZERO,
            )
        if name in {"flops", "matmul"}:
            if not isinstance(value, dict) or not value:
                raise UserError(f"{place}: {name}", "must name number formats", "Write {bf16: 989.0e+12}.")
            entry[name] = {str(dtype): _positive(rate, f"{place}: {name}.{dtype}") for dtype, rate in value.items()}
    entry["matmul"] = {"default": 0.8, **entry.get("matmul", {})}
    entry["units"], entry["domain"] = int(entry.get("units", 100)), int(entry.get("domain", 8))
    entry["overlap"] = tuple(entry.get("overlap", ("tp", "pp", "dp")))
    entry["sources"] = tuple(entry.get("sources", ()))
    return Device(**entry)


def _positive(value: Any, place: str, zero: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not (0 <= number < 1e30) or (number == 0 and not zero):
        raise UserError(place, f"must be a number above zero, not {value!r}", "Write 900.0e+9 or 900000000000.")
    return number
