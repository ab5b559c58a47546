"""How far the trainer's log-probabilities are from those the engine recorded, on one GPU, and what equality costs.

    python bench/gpu_align.py                     the 5.27 B mixture of the tables, 128 answers of 64 tokens (a minute)
    python bench/gpu_align.py --layers 2          a quick look
    python bench/gpu_align.py --mixed             what equality costs on mixed lengths: Qwen's, GLM's and MLA's shapes

The engine samples answers at temperature one. The same tokens then go through the trainer's forward twice: by its
fastest kernels, as every other framework does, and in the invariant mode. Differences are over all answer tokens, and
over all tokens' routers; seconds are of forward, loss and backward. Random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import random
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_decode import make_glm, prompts_of
from bench.gpu_latent import make_model as make_latent
from bench.gpu_train import make_ours
from bench.measure import record
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import as_batch, sample_of
from moesaic.model.context import Routing
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.train.objectives.policy import Policy

SHAPES = {"qwen": (make_ours, 16), "glm": (make_glm, 4), "mla": (make_latent, 8)}  # and layers
MIXED = ((64, 1536), (16, 512))  # tokens of prompts and of answers, from and to


def rollouts(engine: Engine, prompts: list[list[int]], outs: list[int]) -> list:
    wishes = {"temperature": 1.0, "ignore_eos": True, "record_draws": True, "record_routes": True}
    requests = [
        engine.request(prompt, Sampling(**wishes, max_tokens=out, seed=n))
        for n, (prompt, out) in enumerate(zip(prompts, outs, strict=True))
    ]
    for request in requests:
        engine.add(request)
    while engine.working:
        engine.step()
    samples = [sample_of(request, "", Judged(0.0, {}, [])) for request in requests]
    for number, sample in enumerate(samples):
        sample.advantage = 1.0 if number % 2 else -1.0
    return samples


def learned(model: Model, samples: list, mode: str, at_once: int, times: int = 6) -> dict[str, float]:
    """What a step of learning finds about these samples, and how long it takes at its quickest."""
    model.mode = mode
    objective, notes = Policy(), []
    seconds = float("inf")
    for _ in range(times):
        notes = []
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for first in range(0, len(samples), at_once):
            batch = as_batch(samples[first : first + at_once], 0, "token", {}, {}).to("cuda")
            loss = objective(model, batch, Routing())
            loss.total.backward()
            notes.append({name: float(value) for name, value in loss.notes.items()})
        end.record()
        torch.cuda.synchronize()
        seconds = min(seconds, start.elapsed_time(end) / 1000)
        model.zero_grad(set_to_none=True)
    mean = {name: sum(note[name] for note in notes) / len(notes) for name in notes[0]}
    return mean | {"mismatch_max": max(note["mismatch_max"] for note in notes), "seconds": seconds}


def give_back() -> None:
    """The memory of what is no longer there, engines too: one exempts what exists when it starts from collection."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def mixed(shapes: list[str], requests: int) -> None:
    """The cost of equality where lengths are mixed."""
    rows = []
    for name in shapes:
        make, layers = SHAPES[name]
        model = make(layers)
        model.mode = "invariant"
        draw = random.Random(0)
        prompts, outs = [[draw.randint(*bounds) for _ in range(requests)] for bounds in MIXED]
        engine = Engine(model, max_requests=requests, cache_bytes=8 << 30)
        given = [prompts_of(1, length, number)[0] for number, length in enumerate(prompts)]
        start = time.perf_counter()
        samples = rollouts(engine, given, outs)
        row: dict[str, object] = {"shape": name, "rollout_seconds": round(time.perf_counter() - start, 2)}
        del engine
        give_back()
        row["gib_before"] = round(torch.cuda.memory_allocated() / 2**30, 1)
        try:
            found = {mode: learned(model, samples, mode, at_once=8, times=3) for mode in ("fast", "invariant")}
        except torch.cuda.OutOfMemoryError as problem:
            print(f"{name}: {problem}", flush=True)
            continue
        finally:
            model.zero_grad(set_to_none=True)
            del model, samples
        row |= {f"{mode}_seconds": round(one["seconds"], 3) for mode, one in found.items()}
        row |= {f"{mode}_mismatch_max": one["mismatch_max"] for mode, one in found.items()}
        row["cost"] = round(found["invariant"]["seconds"] / found["fast"]["seconds"] - 1, 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
        give_back()
    record("gpu_align_mixed", rows, requests=requests, tokens=MIXED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--mixed", nargs="*", choices=SHAPES, help="these shapes, on mixed lengths; by default all")
    options = parser.parse_args()
    if options.mixed is not None:
        mixed(options.mixed or list(SHAPES), options.requests)
        return
    model = make_ours(options.layers)
    model.mode = "invariant"
    length = options.prompt + options.out
    engine = Engine(model, max_requests=options.requests, cache_bytes=(options.requests + 8) * (length + 16) << 15)
    samples = rollouts(engine, prompts_of(options.requests, options.prompt, 0), [options.out] * options.requests)
    rows = []
    for mode in ("fast", "invariant"):
        found = learned(model, samples, mode, at_once=32)
        row = {"mode": mode, **{name: found[name] for name in ("mismatch_max", "mismatch_mean", "mismatch_kl")}}
        row |= {"routers_differ": found["routers_differ"], "seconds": round(found["seconds"], 3)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(f"invariant against fast: {rows[1]['seconds'] / rows[0]['seconds']:.3f}x the time of a step", flush=True)
    record("gpu_align", rows, layers=options.layers, tokens=options.requests * options.out)


if __name__ == "__main__":
    main()
