"""Try a submitted kernel: the rules, then the sandbox, then a comparison out here with what PyTorch makes of it.

    trial(TASKS["softmax"], source, seed=0).score

The submission's process has neither the reference nor a right result to look at. A correct kernel is worth a half; the
other half is its speed. On a GPU that is the time of PyTorch's own operation over its time, up to 1; elsewhere Triton's
interpreter counts the bytes that it moves, against those that a good kernel needs.
"""

from __future__ import annotations

import base64
import binascii
import glob
import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.worlds.kernels.inputs import made
from moesaic.worlds.kernels.rules import Refused, check
from moesaic.worlds.kernels.tasks import KernelTask
from moesaic.worlds.sandbox import Limits, run_python

INPUTS = Path(__file__).with_name("inputs.py")
INSIDE = Path(__file__).with_name("_kernel_inside.py")
CASES = 3  # shapes
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Trial:
    """What came of a submission; `profile` is what a next attempt can learn from."""

    score: float
    verdict: str
    profile: str = ""
    refused: bool = False

    @property
    def correct(self) -> bool:
        return self.score > 0


def trial(task: KernelTask, source: str, seed: int = 0, seconds: float = 120.0) -> Trial:
    try:
        check(source, task.name)
    except Refused as error:
        return Trial(0.0, f"Refused: {error}.", refused=True)
    draw = random.Random(f"{task.name} {seed}")
    cases = [(task.arguments(draw, False), draw.randrange(1 << 30)) for _ in range(CASES)]
    mark = os.urandom(16).hex()
    timed = task.arguments(draw, True)
    asked = {"source": source, "entry": task.name, "cases": cases, "mark": mark, "timed": timed}
    devices = tuple(sorted(path for path in glob.glob("/dev/nvidia*") if not os.path.isdir(path)))
    limits = Limits(
        seconds=seconds,
        memory_mb=1 << 20 if devices else 24_000,  # of address space, most of which is never touched
        disk_mb=64,
        processes=64,
        open_files=512,
        output_bytes=4_000_000,
    )
    result = run_python(_program(), stdin=json.dumps(asked), limits=limits, devices=devices)
    _, found, said = result.stdout.rpartition(mark)
    if not found:
        last = (result.stderr.strip().splitlines() or [""])[-1]
        return Trial(0.0, f"It did not come to an end: {result.why or last or 'it said nothing'}.")
    try:
        return _judged(task, cases, timed, json.loads(said))
    except (ValueError, KeyError, TypeError, binascii.Error):
        return Trial(0.0, "What it said cannot be read.")


def _program() -> str:
    """Both files as one: there is no package of ours inside."""
    left_out = ("from __future__ import annotations", "from moesaic.worlds.kernels.inputs import made")
    lines = [line for path in (INPUTS, INSIDE) for line in path.read_text(encoding="utf-8").splitlines()]
    return "\n".join(["from __future__ import annotations", *(line for line in lines if not line.startswith(left_out))])


def _judged(task: KernelTask, cases: list[Any], timed: list[Any], answer: dict[str, Any]) -> Trial:
    if "error" in answer:
        return Trial(0.0, f"It failed: {answer['error']}.")
    calls = [(specs, seed + again) for specs, seed in cases for again in (0, 1)]
    if len(answer["results"]) != len(calls):
        return Trial(0.0, "It did not answer every call.")
    needed = 0
    for number, ((specs, seed), result) in enumerate(zip(calls, answer["results"], strict=True)):
        arguments = made(specs, seed)
        wanted = task.reference(*arguments).float()
        needed += sum(value.nbytes for value in (*arguments, wanted) if isinstance(value, torch.Tensor))
        if problem := _problem(result, wanted):
            shapes = ", ".join(str(tuple(v.shape)) for v in arguments if isinstance(v, torch.Tensor))
            again = ", called again with other numbers in the same tensors" if number % 2 else ""
            return Trial(0.0, f"Wrong for shapes {shapes}{again}: {problem}.")
    if answer["device"] == "cuda":
        return _timed(task, timed, cases[0][1], answer)
    moved = int(answer["loaded"]) + int(answer["stored"])
    share = min(1.0, task.traffic * needed / max(moved, 1))
    profile = (
        f"Its {answer['programs']} programs loaded {answer['loaded']} and stored {answer['stored']} bytes, "
        f"{moved / needed:.2f} times what arguments and results have; {task.traffic:g} times is enough."
    )
    return Trial(0.5 + 0.5 * share, "Correct.", profile)


def _problem(result: dict[str, Any], wanted: torch.Tensor) -> str:
    if "problem" in result:
        return str(result["problem"])[:200]
    if list(result["shape"]) != list(wanted.shape):
        return f"the result has shape {tuple(result['shape'])}, and {tuple(wanted.shape)} is right"
    raw = bytearray(base64.b64decode(result["values"]))
    found = torch.frombuffer(raw, dtype=torch.float32).reshape(wanted.shape) if raw else torch.empty(wanted.shape)
    apart = (found - wanted).abs() - TOLERANCE * wanted.abs()
    worst = float(apart.max()) if apart.numel() else 0.0
    return "" if worst <= TOLERANCE else f"some numbers are off by {worst:.3g} (or no numbers)"


def _timed(task: KernelTask, timed: list[Any], seed: int, answer: dict[str, Any]) -> Trial:
    arguments = [v.cuda() if isinstance(v, torch.Tensor) else v for v in made(timed, seed)]
    wanted = task.reference(*arguments)
    apart = abs(float(wanted.double().sum()) - answer["sum"])
    if not apart <= TOLERANCE * float(wanted.double().abs().sum()) + TOLERANCE:
        return Trial(0.0, "Wrong for the shapes at which it is timed.")
    own = _reference_seconds(task, arguments)
    speedup = own / max(float(answer["seconds"]), 1e-9)
    verdict = f"{answer['seconds'] * 1e6:.1f} us; PyTorch takes {own * 1e6:.1f} us, {speedup:.2f} times as long."
    return Trial(0.5 + 0.5 * min(1.0, speedup if math.isfinite(speedup) else 0.0), "Correct.", verdict)


def _reference_seconds(task: KernelTask, arguments: list[Any]) -> float:
    flush, found = torch.empty(64 << 20, dtype=torch.int8, device="cuda"), []
    for number in range(23):
        flush.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        task.reference(*arguments)
        torch.cuda.synchronize()
        found += [time.perf_counter() - start] if number >= 3 else []
    return sorted(found)[len(found) // 2]
