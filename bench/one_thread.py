"""The README's rows of a CPU by processor seconds of one thread, which stand still while other work has the machine.

    python -m bench.one_thread                            writes bench/results/one_thread_PROCESSOR.json, row by row
    python -m bench.one_thread --cases decode ragged      those alone; other rows of the file stay

What is compared is what `bench.forward`, `bench.serve_cpu` and `bench.speculation_cpu` compare, by the least of turns
that alternate: a decode step of the mixture and a ragged batch forward and backward beside `transformers`, prompts that
share a prefix with and without the prefix cache, and repetitive text with and without the suffix drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench import forward, serve_cpu, speculation_cpu
from bench.measure import RESULTS, machine, record
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling

MIXTURE, TRAINED = "qwen3_moe 238M", "glm4_moe 32M"
REQUESTS = 8  # that share a prefix
CASES = ("decode", "ragged", "prefix", "suffix")


def least(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Processor seconds of each, after a first turn that does not count."""
    times: dict[str, float] = dict.fromkeys(runs, float("inf"))
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name] = min(times[name], time.process_time() - start)
    return times


def beside_transformers(case: str) -> dict[str, Any]:
    if case == "decode":
        model, turns = MIXTURE, 12
        runs = forward.step_runs(*forward.pair(model))
    else:
        model, turns = TRAINED, 2
        runs = forward.forward_runs(*forward.pair(model), forward.RAGGED, True)
    times = least(runs, turns)
    own = times.pop("ours")
    kind, peer = min(times.items(), key=lambda item: item[1])
    return {"model": model, "peer": f"transformers, {kind}", "peer_seconds": peer, "ours_seconds": own}


def with_a_prefix() -> dict[str, Any]:
    _, model = forward.pair(MIXTURE)
    seconds = serve_cpu.shared_prefix(model, REQUESTS, clock=time.process_time)["seconds"]
    peer = f"without the prefix cache, {REQUESTS} requests of 1,024 tokens"
    return {"model": MIXTURE, "peer": peer, "peer_seconds": seconds["without"], "ours_seconds": seconds["with"]}


def drafted(directory: Path) -> dict[str, Any]:
    model = moesaic.load(directory, dtype="float32", device="cpu", threads=1)
    sampling = Sampling(max_tokens=96, temperature=0.0, seed=1)
    seconds = {"plain": 0.0, "suffix": 0.0}
    for text, prompt in speculation_cpu.REPETITIVE.items():
        for name, drafter in (("plain", None), ("suffix", Suffix())):
            engine = Engine(model, cache_bytes=speculation_cpu.CACHE, drafter=drafter)
            run = speculation_cpu.ask(engine, prompt, sampling)
            seconds[name] += run.cpu
            print(f"suffix: {text}: {name} {run.cpu:.1f} s, {run.passes} passes", flush=True)
    peer = "without a drafter, repetitive text"
    return {"model": "SmolLM2 135M", "peer": peer, "peer_seconds": seconds["plain"], "ours_seconds": seconds["suffix"]}


def measured(cases: list[str], directory: Path) -> Iterator[dict[str, Any]]:
    for case in cases:
        row = (
            beside_transformers(case)
            if case in ("decode", "ragged")
            else with_a_prefix()
            if case == "prefix"
            else drafted(directory)
        )
        ratio = row["peer_seconds"] / row["ours_seconds"]
        yield {"case": case, **row, "ratio": ratio, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("out/smollm2"), help="SmolLM2, for the drafter")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name = f"one_thread_{platform.machine()}"
    for row in measured(arguments.cases, arguments.model):
        file = RESULTS / f"{name}.json"
        known = json.loads(file.read_text())["rows"] if file.exists() else []
        kept = [old for old in known if old["case"] != row["case"]]
        print(row, record(name, [*kept, row], clock="processor seconds of one thread"), flush=True)
    print(machine())


if __name__ == "__main__":
    main()
