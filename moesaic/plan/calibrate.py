"""Measure this machine for the planner: matmul rate by size, memory bandwidth, attention, launch latency.

    entry = measure()            # a few seconds, on the GPU if there is one
    write_entry(entry)           # into hardware.OWN, so that `--cluster 1xhere` works from now on

`take_timings` runs things (the only part that imports torch), `fit` turns timings into the constants of a `Device` with
the formulas of `cost.py` turned round, by medians, so that a noisy moment does not count.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from moesaic.atomic import replacing_file
from moesaic.errors import UserError
from moesaic.plan import hardware
from moesaic.plan.cost import SHORT_TILE, TILE
from moesaic.plan.hardware import FORMAT_BYTES, Device, catalogue, load_device
from moesaic.yaml_reader import read_yaml

NAME = "here"
WARM_UP = 2
REPEATS = 3  # at least
BURST = 2e-3  # seconds of kernels in a row on a GPU
WIDTHS = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 768)}
INNER = {"cuda": (128, 512, 2048, 8192), "cpu": (64, 256, 1024)}
COPIED = {"cuda": (1 << 28, 1 << 29), "cpu": (1 << 24, 1 << 25)}  # numbers: far more than any cache holds


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation: `matmul` of m x k by k x n, `copy` of `bytes_` (read and written together),
    `attention` of `flops`, or `launch` of nothing much."""

    kind: str
    seconds: float
    dtype: str = "fp32"
    m: int = 0
    n: int = 0
    k: int = 0
    bytes_: float = 0.0
    flops: float = 0.0


def measure(device: str | None = None, seconds: float = 6.0) -> dict[str, Any]:
    """An entry for this machine. `device`: `cpu` or `cuda`; None: the GPU if there is one. Takes about `seconds`."""
    facts = machine_facts(device)
    base = known_device(facts["name"]) or ("cpu" if facts["kind"] == "cpu" else "h100")
    known = known_device(facts["name"]) is not None
    timings = take_timings(facts["kind"], seconds)
    entry = fit(timings, load_device(base), units=facts["units"], known=known)
    source = f"measured on {facts['name']}, {time.strftime('%Y-%m-%d')}"
    return {"base": base, **entry, "memory_bytes": float(facts["memory_bytes"]), "sources": [source]}


def known_device(name: str) -> str | None:
    """The device of the catalogue that a driver's name means: the longest of its names found in it."""

    def letters(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    wanted = letters(name)
    found = [
        (len(letters(alias)), key)
        for key, entry in catalogue().items()
        for alias in (key, *map(str, entry.get("names", [])))
        if letters(alias) in wanted and key != "cpu"
    ]
    return max(found)[1] if found else None


def fit(timings: Sequence[Timing], base: Device, units: int | None = None, known: bool = True) -> dict[str, Any]:
    """What `cost.py` needs to give these timings. Of a device that the catalogue knows, shares of its peaks; of another
    one, the rates reached are its peaks."""
    launch = _median((timing.seconds for timing in timings if timing.kind == "launch"), "launch")
    copies = [timing for timing in timings if timing.kind == "copy"]
    bandwidth = _median((timing.bytes_ / max(1e-9, timing.seconds - launch) for timing in copies), "copy")
    units = units or base.units
    rates, halves = {}, []
    for dtype in sorted({timing.dtype for timing in timings if timing.kind == "matmul"}):
        some = [timing for timing in timings if timing.kind == "matmul" and timing.dtype == dtype]
        rates[dtype], half = _matmul_curve(some, units, base.wave, bandwidth, launch)
        halves.append(half)
    if not rates:
        raise UserError("calibration", "no matmul was measured")
    best = max(rates.values())
    attention = [timing for timing in timings if timing.kind == "attention"]
    entry: dict[str, Any] = {"launch": launch, "units": units, "k_half": max(1.0, statistics.median(halves))}
    if known:
        entry["matmul"] = {dtype: rate / base.peak(dtype) for dtype, rate in rates.items()}
        entry["memory"] = bandwidth / base.bandwidth
        peak = base.peak("bf16")
    else:
        entry["flops"] = {**dict.fromkeys(base.flops, best), **rates}
        entry["matmul"] = {"default": 1.0, **dict.fromkeys(base.matmul.keys() | rates.keys(), 1.0)}
        entry["bandwidth"], entry["memory"] = bandwidth, 1.0
        peak = entry["flops"].get("bf16", best)
    if attention:
        rate = _median((timing.flops / max(1e-9, timing.seconds - launch) for timing in attention), "attention")
        entry["attention"] = rate / peak
    return entry


def _matmul_curve(
    timings: Sequence[Timing], units: int, wave: float, bandwidth: float, launch: float
) -> tuple[float, float]:
    """The rate of large matmuls and the inner size that has half of it. Seconds per flop are (1 + half / k) / rate, a
    line over 1 / k: its slope is the median over all pairs (Theil and Sen), so that outliers do not count."""
    points: list[tuple[float, float]] = []
    for timing in timings:
        tiles = math.ceil(timing.m / TILE) * math.ceil(timing.n / TILE)
        filled = (tiles / (math.ceil(tiles / units) * units)) ** wave
        size = FORMAT_BYTES[timing.dtype]
        moving = (size * (timing.m + timing.n) * timing.k + 2 * timing.m * timing.n) / bandwidth
        working = (timing.seconds - launch) ** 4 - moving**4 if timing.seconds > launch else 0.0
        if working <= 0:
            continue  # the memory's time, not the cores'
        rows = math.ceil(timing.m / SHORT_TILE) * SHORT_TILE
        points.append((1 / timing.k, working**0.25 * filled / (2 * rows * timing.n * timing.k)))
    if not points:
        raise UserError("calibration", "no matmul was large enough to be measured", "Close other programs; try again.")
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    inverse = statistics.median(y - slope * x for x, y in points)
    if inverse <= 0:  # too noisy for a line: one rate for all
        slope, inverse = 0.0, statistics.median(y for _, y in points)
    return 1 / inverse, slope / inverse


def _median(values: Iterable[float], what: str) -> float:
    found = [value for value in values if math.isfinite(value) and value > 0]
    if not found:
        raise UserError("calibration", f"no {what} was measured")
    return float(statistics.median(found))


def write_entry(entry: dict[str, Any], name: str = NAME, file: Path | None = None) -> Path:
    """Into the user's own devices, beside what is there; the file is the old one or the new one, never half."""
    path = file or hardware.OWN
    known = read_entries(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({**known, name: entry}, sort_keys=False)
    with replacing_file(path) as fresh:
        fresh.write_text(f"# Devices that `moesaic plan calibrate` measured; yours to change (docs/plan.md).\n{text}")
        load_device(name, own=fresh)  # an entry that cannot be used is refused, and the old file stays
    return path


def read_entries(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    remedy = f"Mend it or remove it ({file}), then calibrate again."
    try:
        found = read_yaml(file.read_text(), str(file))
    except (UserError, UnicodeDecodeError) as error:
        problem = error.problem if isinstance(error, UserError) else "is not text"
        raise UserError(file, f"cannot be read: {problem}", remedy) from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise UserError(file, "is not a list of devices", remedy)
    return {str(key): entry for key, entry in found.items()}


# What runs on the machine


def machine_facts(device: str | None = None) -> dict[str, Any]:
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UserError(f"--device {device}", "is unknown", "Take cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda", "there is no GPU that torch can use", "Take --device cpu.")
    if device != "cpu" and torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        return {
            "kind": "cuda",
            "name": facts.name,
            "units": facts.multi_processor_count,
            "memory_bytes": facts.total_memory,
        }
    pages = Path("/proc/meminfo")
    total = 8e9
    if pages.is_file():
        total = float(next(line for line in pages.read_text().splitlines() if "MemTotal" in line).split()[1]) * 1024
    return {"kind": "cpu", "name": "cpu", "units": torch.get_num_threads(), "memory_bytes": total}


def take_timings(kind: str, seconds: float) -> list[Timing]:
    """Medians, after a warm-up; every operation gets its part of `seconds`."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    large = kind == "cuda"
    widths, inner = WIDTHS[kind], INNER[kind]
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def clock(run: Callable[[], object], part: float) -> float:
        def once(burst: int) -> float:
            start = time.perf_counter()
            for _ in range(burst):
                run()
            if large:
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / burst

        first = min(once(1) for _ in range(WARM_UP))
        # A GPU's kernels follow each other without waiting for the host, as in a model; one by one they would not.
        burst = max(1, int(BURST / max(first, 1e-7))) if large else 1
        count = max(REPEATS, min(1000, int(part / max(first * burst, 1e-7))))
        return statistics.median(once(burst) for _ in range(count if first < part else 1))

    def random(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape, device=kind).to(dtype)  # constants would draw less power than any real work

    part = seconds / (2 * len(widths) * len(inner) + 8)
    found: list[Timing] = []
    with torch.no_grad():
        tiny = random(8)
        found += [Timing("launch", clock(partial(tiny.add_, 1.0), part)) for _ in range(3)]
        for count in COPIED[kind]:
            source = torch.ones(count, device=kind)
            copied = clock(partial(torch.empty_like(source).copy_, source), part)
            found.append(Timing("copy", copied, bytes_=8.0 * count))
        slow = ""
        for (name, dtype), width, k in itertools.product(formats.items(), widths, inner):
            if name == slow:
                continue
            a, b = random(width, k, dtype=dtype), random(k, width, dtype=dtype)
            took = clock(partial(torch.mm, a, b), part)
            found.append(Timing("matmul", took, name, width, width, k))
            same = [one.seconds for one in found if (one.kind, one.dtype, one.m, one.k) == ("matmul", "fp32", width, k)]
            if name != "fp32" and took > 10 * same[0]:
                slow = name  # no instructions for it here: larger ones would take minutes
                found = [one for one in found if one.dtype != name]
        heads, length = (16, 4096) if large else (4, 512)
        dtype = torch.bfloat16 if large else torch.float32
        q, keys, values = (random(1, heads, length, 128, dtype=dtype) for _ in range(3))
        flops = 4.0 * heads * length * length * 128
        took = clock(lambda: scaled_dot_product_attention(q, keys, values), part)
        found.append(Timing("attention", took, flops=flops))
    return found


@dataclass(frozen=True)
class Trial:
    """A perceptron of the score's search (aiperf.py)."""

    width: int
    depth: int


class TrialTask(Protocol):
    @property
    def batch(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def run_trial(
    kind: str, layers: Sequence[tuple[int, int]], task: TrialTask, seed: int, epochs: int
) -> tuple[float, float]:
    """Trains one perceptron on the labels of a fixed random teacher; its best validation error, and the seconds."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(1234)  # the task is the same everywhere, whatever the seed
    count = task.samples + task.samples // 4
    x_TD = torch.randn(count, task.inputs, generator=generator)
    teacher = torch.randn(task.inputs, 16, generator=generator) / math.sqrt(task.inputs)
    head = torch.randn(16, task.classes, generator=generator)
    y_T = ((x_TD @ teacher).tanh() @ head).argmax(-1)
    x_TD, y_T = x_TD.to(kind), y_T.to(kind)
    order = torch.Generator().manual_seed(seed)
    weights = [
        (torch.randn(rows, columns, generator=order) * math.sqrt(2 / rows)).to(kind).requires_grad_()
        for rows, columns in layers
    ]
    rate = 2e-3 * math.sqrt(256 / layers[0][1])
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01)
    narrow = torch.autocast(kind, torch.bfloat16, enabled=task.dtype == "bf16")

    def forward(h_TD: Any) -> Any:
        for place, weight in enumerate(weights):
            h_TD = h_TD @ weight
            if place < len(weights) - 1:
                h_TD = functional.relu(h_TD)
        return h_TD

    best = 1.0
    start = time.perf_counter()
    for _ in range(epochs):
        shuffled = torch.randperm(task.samples, generator=order).to(kind)
        for chosen in shuffled.split(task.batch):
            with narrow:
                loss = functional.cross_entropy(forward(x_TD[chosen]).float(), y_T[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad(), narrow:
            found = torch.cat([forward(some).argmax(-1) for some in x_TD[task.samples :].split(task.batch)])
        best = min(best, float((found != y_T[task.samples :]).float().mean()))  # waits for the device
    return best, time.perf_counter() - start
