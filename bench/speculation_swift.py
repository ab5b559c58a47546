"""Drafting beside the model (`swift`, SwiftSpec) against drafting before it (`model`), and against none, on a CPU.

    python -m bench.speculation_swift                 some minutes on two cores that nobody else uses

The model is a small one with zeros around it (`bench/widened.py`), so that it costs what a large one costs; its draft
model is the small one with noise on its weights, so that they agree often and not always. Neither says anything of
texts: what is compared is what each drafter makes of the same pair. One request at a time, and four; greedy and drawn.
`model` and no drafter have all threads; `swift` gives one to its draft process. Answers must be equal to the bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.measure import record
from bench.widened import widened
from moesaic.model.directory import save
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.swift import Swift
from moesaic.serve.core.engine import Engine
from tests.serve.made import talking_model

PROMPTS = ["The number 7 is", "as you like it, yes or no", 'The number 9 is a number; {"name"', "and yes"]
CACHE = 1 << 28


def pair(folder: Path, noise: float, hidden: int, layers: int) -> tuple[Model, Path]:
    """The model, and the directory of its draft model."""
    small = moesaic.load(talking_model(folder / "small"), dtype="float32", device="cpu")
    wide = widened(small, hidden, hidden // 2, layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in small.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save(small, folder / "draft")
    return wide.eval(), folder / "draft"


def ask(engine: Engine, prompts: list[str], tokens: int, wishes: dict[str, Any]) -> dict[str, Any]:
    before, began, cpu = replace(engine.counts), time.perf_counter(), time.process_time()
    answers = engine.generate(prompts, max_tokens=tokens, ignore_eos=True, **wishes)
    seconds, after = time.perf_counter() - began, engine.counts
    return {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "steps": after.steps - before.steps,
        "drafted": after.drafted_tokens - before.drafted_tokens,
        "accepted": after.accepted_tokens - before.accepted_tokens,
        "bits": [(one.tokens, [entry.logprob for entry in one.logprobs]) for one in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--noise", type=float, default=0.05, help="of the draft model, in standard deviations")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model, draft = pair(Path(folder), given.noise, given.hidden, given.layers)
        cores = torch.get_num_threads()
        makers: dict[str, Callable[[], Drafter | None]] = {
            "none": lambda: None,
            "model": lambda: DraftModel(str(draft)),
            "swift": lambda: Swift(str(draft)),
            "swift wait": lambda: Swift(str(draft), wait=0.01),
        }
        engines = {}
        for name, make in makers.items():
            torch.set_num_threads(cores)
            engines[name] = Engine(model, cache_bytes=CACHE, drafter=make())
        for count in (1, 4):
            for temperature in (0.0, 1.0):
                rows += compare(engines, cores, PROMPTS[:count], temperature, given.tokens, given.rounds)
    facts = {name: getattr(given, name) for name in ("hidden", "layers", "noise", "tokens", "rounds")}
    print(
        record(
            "speculation_swift",
            rows,
            parameters=sum(weight.numel() for weight in model.parameters()),
            load=os.getloadavg()[0],
            **facts,
        )
    )


def compare(
    engines: dict[str, Engine], cores: int, prompts: list[str], temperature: float, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        answers = []
        for name, engine in engines.items():  # in turn, so that a noisy moment hits all alike
            torch.set_num_threads(max(1, cores - 1) if name.startswith("swift") else cores)
            run = ask(engine, prompts, tokens, {"temperature": temperature, "seed": number})
            answers.append(run.pop("bits"))
            assert answers[-1] == answers[0], f"{name}: the answers differ"
            if number:  # the first warms up
                runs[name].append(run)
    rows = []
    for name in engines:
        seconds = statistics.median(run["seconds"] for run in runs[name])
        total = {key: sum(run[key] for run in runs[name]) for key in ("steps", "drafted", "accepted")}
        rows.append(
            {
                "requests": len(prompts),
                "temperature": temperature,
                "drafter": name,
                "tokens_per_second": len(prompts) * tokens / seconds,
                "tokens_per_step": rounds * len(prompts) * tokens / total["steps"],
                "accepted_per_step": total["accepted"] / total["steps"] / len(prompts),
                "accepted_share": total["accepted"] / max(1, total["drafted"]),
            }
        )
        shown = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in rows[-1].values()]
        print("".join(f"{word:>12}" for word in shown), flush=True)
    return rows


if __name__ == "__main__":
    main()
