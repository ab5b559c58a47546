"""Measured times of expert layers from the Parquet tables of the package `aiconfigurator-core`, where it is installed.

The package is no dependency: without it, or for a device, engine, format or layer it has not measured, the planner's
own roofline answers. With it, `estimate_serving(..., tables=find_tables())` asks the engine's newest table that has a
layer (routing skewed by a power law, as in real traffic; interpolated in the number of tokens).
"""

from __future__ import annotations

import bisect
import importlib.util
import math
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

FORMATS = {  # our name: theirs, the best first
    "bf16": ("bfloat16",),
    "fp8": ("fp8_block", "fp8"),
    "fp4": ("nvfp4", "w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "int4": ("int4_wo",),
}
SUFFIXES = ("", "_sxm")
SKEW = "power_law_1.01"
COLUMNS = ["moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
           "distribution", "latency"]  # fmt: skip

Curve = tuple[list[float], list[float]]  # tokens, seconds


@dataclass(frozen=True)
class ExpertLayer:
    hidden: int
    width: int
    topk: int
    experts: int
    tp: int
    ep: int


@dataclass
class MeasuredTables:
    root: Path  # systems/data of the package
    curves: dict[tuple[str, str], dict[tuple[str, ExpertLayer], Curve]] = field(default_factory=dict)

    def expert_seconds(self, device: str, engine: str, dtype: str, layer: ExpertLayer, tokens: float) -> float | None:
        """One expert layer of one rank for `tokens` tokens of all ranks together; None where nothing was measured."""
        known = self._table(device, engine)
        for name in FORMATS.get(dtype, ()):
            if curve := known.get((name, layer)):
                return interpolate(curve, tokens)
        return None

    def _table(self, device: str, engine: str) -> dict[tuple[str, ExpertLayer], Curve]:
        key = (device, engine)
        if key not in self.curves:
            files = [
                file
                for suffix in SUFFIXES
                for file in (self.root / f"{device}{suffix}" / "moe" / engine).glob("*/moe_perf.parquet")
            ]
            self.curves[key] = {}
            for file in sorted(files, key=lambda file: _version(file.parent.name)):
                self.curves[key] |= _read(file)  # what a newer version measured again replaces the older
        return self.curves[key]


def find_tables() -> MeasuredTables | None:
    """The installed package's tables, if it is installed."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(next(iter(found.submodule_search_locations))) / "systems" / "data"
    return MeasuredTables(root) if root.is_dir() else None


def interpolate(curve: Curve, tokens: float) -> float:
    """Straight in the logarithms; beyond the largest number measured in proportion to the tokens."""
    counts, seconds = curve
    if tokens <= counts[0]:
        return seconds[0]
    if tokens >= counts[-1]:
        return seconds[-1] * tokens / counts[-1]
    right = bisect.bisect_right(counts, tokens)
    low, high = counts[right - 1], counts[right]
    part = math.log(tokens / low) / math.log(high / low)
    return seconds[right - 1] * (seconds[right] / seconds[right - 1]) ** part


def _version(name: str) -> tuple[int, ...]:
    digits = "".join(letter if letter.isdigit() else " " for letter in name)
    return tuple(int(part) for part in digits.split())


def _read(file: Path) -> dict[tuple[str, ExpertLayer], Curve]:
    import pyarrow.compute as pc  # only who asks for tables waits for it
    import pyarrow.parquet as pq

    table = pq.read_table(file, columns=COLUMNS)
    table = table.filter(pc.equal(table["distribution"], SKEW)).sort_by("num_tokens")
    made: dict[tuple[str, ExpertLayer], Curve] = {}
    values = [table[name].to_pylist() for name in COLUMNS]
    for dtype, tokens, hidden, width, topk, experts, tp, ep, _, latency in zip(*values, strict=True):
        layer = ExpertLayer(int(hidden), int(width), int(topk), int(experts), int(tp), int(ep))
        counts, seconds = made.setdefault((str(dtype), layer), ([], []))
        if counts and counts[-1] == tokens:  # another kernel for the same: engines take the faster
            seconds[-1] = min(seconds[-1], latency / 1e3)
        else:
            counts.append(float(tokens))
            seconds.append(latency / 1e3)
    # More tokens never take less: what a table says otherwise is noise of its measurements.
    return {key: (counts, list(accumulate(seconds, max))) for key, (counts, seconds) in made.items()}
