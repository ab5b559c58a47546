"""Prefix caching where layers keep states: processor seconds with and without it, of what shares much and what shares
nothing. A random model of Qwen3-Next's shape (bench/families.py), float32, one thread, eight tokens written each.

    python -m bench.kept_states            about a minute; writes bench/results/kept_states.json

Texts must be the same either way, or the bench stops. `without / with` above 1: the cache pays.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from bench.families import SIZES, models
from bench.measure import record
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine

WRITTEN, ROUNDS = 8, 3


def text(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, SIZES["vocab_size"]) for _ in range(length)]


def together(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [one.tokens for one in engine.generate(prompts, max_tokens=WRITTEN, temperature=0.0, ignore_eos=True)]


def conversation(engine: Engine, turns: list[list[int]]) -> list[list[int]]:
    said: list[int] = []
    answers = []
    for turn in turns:
        said = said + turn
        answers += together(engine, [said])
        said = said + answers[-1]
    return answers


def main() -> None:
    torch.set_num_threads(1)
    _, model = models("qwen3_next")
    draw = random.Random(0)
    shared = text(draw, 900)
    cases: dict[str, tuple[Callable[[Engine, list[list[int]]], list[list[int]]], list[list[int]]]] = {
        "16 requests that share 900 tokens and have 24 of their own": (
            together,
            [shared + text(draw, 24) for _ in range(16)],
        ),
        "a conversation of ten turns of 80 tokens": (conversation, [text(draw, 80) for _ in range(10)]),
        "16 requests of 200 tokens that share nothing": (together, [text(draw, 200) for _ in range(16)]),
        "16 requests of 24 tokens that share nothing": (together, [text(draw, 24) for _ in range(16)]),
    }
    rows = [measured(model, name, run, prompts) for name, (run, prompts) in cases.items()]
    print(record("kept_states", rows, written=WRITTEN, clock="processor time, one thread, medians of turns"))


def measured(
    model: Model, name: str, run: Callable[[Engine, list[list[int]]], list[list[int]]], prompts: list[list[int]]
) -> dict[str, object]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    texts: dict[bool, list[list[int]]] = {}
    for _ in range(ROUNDS):
        for reuse in seconds:
            engine = Engine(model, reuse_prefixes=reuse, cache_bytes=1 << 29)
            start = time.process_time()
            texts[reuse] = run(engine, prompts)
            seconds[reuse].append(time.process_time() - start)
    assert texts[True] == texts[False], "other texts with the cache"
    found, plain = (statistics.median(seconds[reuse]) for reuse in (True, False))
    print(f"{name:60} without {plain:6.2f} s, with {found:6.2f} s: {plain / found:.2f}", flush=True)
    return {"case": name, "without": plain, "with": found, "ratio": plain / found}


if __name__ == "__main__":
    main()
