"""Everything that is promised of one H200, in one run of under ten minutes: each bench with its peers, then the goals.

    python bench/gpu.py                            all parts; tables to bench/results/gpu_*.json, goals to gpu.json
    python bench/gpu.py --parts serving,decode     some of them

Each part is a program of its own (`bench/gpu_*.py`) in a process of its own, and is cut off when its time is up: what
it wrote until then counts, and what it did not reach is "not measured", never taken from an earlier run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from bench.measure import RESULTS, record  # noqa: E402


@dataclass(frozen=True)
class Part:
    command: tuple[str, ...]
    seconds: int
    result: str  # the file it writes


PARTS = {
    "train": Part(("gpu_train.py", "--who", "moesaic", "transformers"), 150, "gpu_train.json"),
    "experts": Part(
        (
            "gpu_experts.py",
            "--part",
            "training",
            "--peers",
            "grouped_mm",
            "--out",
            f"{RESULTS}/gpu_experts_training.json",
        ),
        110,
        "gpu_experts_training.json",
    ),
    "serving": Part(
        (
            "gpu_experts.py",
            "--part",
            "serving",
            "--peers",
            "grouped_mm",
            "--out",
            f"{RESULTS}/gpu_experts_serving.json",
        ),
        80,
        "gpu_experts_serving.json",
    ),
    "quantized": Part(("gpu_quantized.py", "--out", f"{RESULTS}/gpu_quantized.json"), 60, "gpu_quantized.json"),
    "decode": Part(("gpu_decode.py",), 190, "gpu_decode.json"),
}


@dataclass(frozen=True)
class Goal:
    """`find` reads a part's result; it may fail with KeyError or IndexError where that was not reached."""

    part: str
    what: str
    aimed: float
    find: Callable[[Any], float]
    least: bool = True  # or at most

    def met(self, found: float) -> bool:
        return found >= self.aimed if self.least else found <= self.aimed


def faster(shape: str) -> Callable[[Any], float]:
    def ratio(result: Any) -> float:
        cells = result["training"][shape]
        return float(cells["ours"]["both_tflops"] / cells["grouped_mm"]["both_tflops"])

    return ratio


def serving(shape: str, tokens: int) -> Callable[[Any], float]:
    return lambda result: float(result["serving"][shape][str(tokens)]["ours"])


def share(shape: str, tokens: int) -> Callable[[Any], float]:
    """Of the memory floor: how many experts are read depends on what tokens happen to choose."""
    return lambda result: float(result["serving"][shape][str(tokens)]["floor_us"]) / serving(shape, tokens)(result)


def quantized(shape: str) -> Callable[[Any], float]:
    def ratio(result: Any) -> float:
        row = result["layers"][shape]["1"]
        return float(row["bf16"]["us"] / row["4 bits"]["us"])

    return ratio


def by(key: str, of: Any, value: str) -> Callable[[Any], float]:
    """The number `value` of the row whose `key` is `of`."""
    return lambda result: float(next(row[value] for row in result["rows"] if row[key] == of))


def trained(result: Any) -> float:
    ours, peer = (by("who", who, "tokens_per_second")(result) for who in ("moesaic", "transformers"))
    return ours / peer


# Of the memory floor, by the fastest serving kernel measured elsewhere on such a machine (vLLM's Triton MoE).
REFERENCE = {"Qwen3-30B": (0.55, 0.84, 0.85, 0.81, 0.65), "GLM-4.5-Air": (0.77, 0.94, 0.93, 0.88, 0.72)}
GOALS = [
    *(
        Goal("experts", f"{shape}, forward and backward, times grouped_mm compiled", aimed, faster(shape))
        for shape, aimed in (("GLM-4.5-Air", 1.1), ("Qwen3-30B", 1.1), ("Mixtral", 1.0), ("gpt-oss", 1.05))
    ),
    *(
        Goal("serving", f"{shape}, {tokens} tokens, share of the memory floor", aimed, share(shape, tokens))
        for shape, shares in REFERENCE.items()
        for tokens, aimed in zip((1, 16, 64, 256, 1024), shares, strict=True)
    ),
    Goal("serving", "Qwen3-30B, 1 token, us", 23, serving("Qwen3-30B", 1), least=False),
    *(
        Goal("quantized", f"{shape}, one token in 4 bits, times bf16", 2.0, quantized(shape))
        for shape in ("Qwen3-30B", "GLM-4.5-Air")
    ),
    *(
        Goal("decode", f"{count} requests, tokens/s", aimed, by("requests", count, "output_tokens_per_second"))
        for count, aimed in ((1, 1000), (128, 19000), (512, 25000))
    ),
    Goal("train", "times transformers compiled", 1.15, trained),
    Goal("train", "tokens/s", 62000, by("who", "moesaic", "tokens_per_second")),
]


def run(part: Part) -> Any:
    """What it wrote, or None."""
    file = RESULTS / part.result
    before = file.stat().st_mtime_ns if file.exists() else 0
    try:
        subprocess.run([sys.executable, HERE / part.command[0], *part.command[1:]], timeout=part.seconds, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{part.command[0]}: {type(error).__name__}", flush=True)
    if not file.exists() or file.stat().st_mtime_ns == before:
        return None
    return json.loads(file.read_text())


def judged(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for goal in GOALS:
        if goal.part not in results:
            continue
        try:
            found = round(goal.find(results[goal.part]), 3)
        except (KeyError, IndexError, StopIteration, TypeError):
            found = None
        met = None if found is None else goal.met(found)
        yield {"part": goal.part, "what": goal.what, "aimed": goal.aimed, "found": found, "met": met}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    began = time.perf_counter()
    results = {name: run(PARTS[name]) for name in options.parts.split(",")}
    rows = list(judged(results))
    words = {True: "met", False: "MISSED", None: "not measured"}
    for row in rows:
        found = "-" if row["found"] is None else row["found"]
        print(f"{row['part']:9} {row['what']:60} {found:>9}  aimed at {row['aimed']:>7}: {words[row['met']]}")
    record("gpu", rows, seconds=round(time.perf_counter() - began))


if __name__ == "__main__":
    main()
