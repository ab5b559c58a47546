"""Chains of drafters chosen online (`--drafter router draft_model=[SMALL,MIDDLE]`) against each drafter and none.

    python -m bench.speculation_chains                     some minutes on one core

A model, a middle one that resembles it and a small one that resembles the middle one: one small random model, with
noise, and with zeros around it (`bench/widened.py`) so that each costs what its size costs. So nothing is said of
texts; what is compared is what each way of drafting makes of the same models, in four situations in which different
ways win. Single thread, processor time, one stream, in turn; answers must be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
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
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from tests.serve.made import talking_model

CACHE = 1 << 27
SHAPES = {"model": (1024, 10), "middle": (320, 5), "small": (96, 3)}  # hidden, layers
# Noise of the middle model against the model, of the small one against the middle one; whether prompts come again.
SITUATIONS = {
    "asked again": (0.02, 0.1, True),
    "a small model that is good enough": (0.005, 0.005, False),
    "a small model that is not": (0.02, 0.12, False),
    "draft models that know nothing": (2.0, 2.0, False),
}


def family(folder: Path, noises: tuple[float, float]) -> tuple[Model, dict[str, Path]]:
    own = moesaic.load(talking_model(folder / "own"), dtype="float32", device="cpu", threads=1)
    model = widened(own, SHAPES["model"][0], SHAPES["model"][0] // 2, SHAPES["model"][1])
    paths = {}
    for number, (name, noise) in enumerate(zip(("middle", "small"), noises)):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for weight in own.parameters():
                if weight.dim() > 1:
                    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
        hidden, layers = SHAPES[name]
        paths[name] = folder / name
        save(widened(own, hidden, hidden // 2, layers), paths[name])
    return model.eval(), paths


def prompts(count: int, again: bool) -> list[str]:
    made = [f"The number {7 * n} is a number; as you like it {n}" for n in range(count)]
    return [made[0]] * count if again else made


def ask(engine: Engine, prompt: str, tokens: int) -> tuple[list[int], float]:
    request = engine.request(prompt, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    engine.add(request)
    while request.first_token is None:
        engine.step()
    began = time.process_time()
    while request.finish_reason is None:
        engine.step()
    return request.tokens, time.process_time() - began


def compare(name: str, folder: Path, tokens: int, count: int) -> list[dict[str, Any]]:
    middle_noise, small_noise, again = SITUATIONS[name]
    model, paths = family(folder, (middle_noise, small_noise))
    makers: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "suffix": Suffix,
        "small": lambda: DraftModel(str(paths["small"])),
        "middle": lambda: DraftModel(str(paths["middle"])),
        "router": lambda: DraftRouter(draft_model=[str(paths["small"]), str(paths["middle"])]),
    }
    engines = {
        kind: Engine(model, cache_bytes=CACHE, drafter=make(), clock=time.process_time) for kind, make in makers.items()
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    for prompt in prompts(count, again):
        answers = []
        for kind, engine in engines.items():
            found, took = ask(engine, prompt, tokens)
            answers.append(found)
            seconds[kind].append(took)
            assert found == answers[0], f"{name}, {kind}: the answers differ"
    rows = []
    for kind, engine in engines.items():
        rest = seconds[kind][1:]  # the first warms up, and gives the suffix tree its text
        row = {
            "situation": name,
            "drafter": kind,
            "ms_per_token": 1000 * statistics.mean(rest) / (tokens - 1),
            "ratio": statistics.mean(seconds["none"][1:]) / statistics.mean(rest),
            "tokens_per_step": count * tokens / engine.counts.steps,
            "accepted": dict(engine.drafter.accepted) if isinstance(engine.drafter, DraftRouter) else {},
        }
        if kind == "router" and isinstance(engine.drafter, DraftRouter):
            top = engine.drafter.drafters[-1]
            assert isinstance(top, DraftModel) and top.below is not None
            row["accepted_by_the_middle_model"] = dict(top.below.accepted)
        rows.append(row)
        print(f"{name:36}{kind:>8}{row['ms_per_token']:9.1f} ms{row['ratio']:7.2f}x  {row['accepted']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in SITUATIONS:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(name, Path(folder), given.tokens, given.prompts)
    facts = {"shapes": SHAPES, "tokens": given.tokens, "prompts": given.prompts, "load": os.getloadavg()[0]}
    print(record("speculation_chains", rows, clock="processor time of one thread", **facts))


if __name__ == "__main__":
    main()
