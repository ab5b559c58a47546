"""Requests with LoRA adapters on one GPU, beside the same requests without: what one adapter costs everybody.

    python bench/gpu_adapters.py                   1 and 64 requests of 512 in, 128 out; adapters of rank 16
    python bench/gpu_adapters.py --blocks          layer by layer too, as all steps with an adapter ran before

The 5.3 B mixture, random weights, bfloat16, greedy. Adapters correct queries, keys, values and the output projection of
every layer. The best of three runs; a run's prompts were not seen before.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_decode import prompts_of
from bench.gpu_train import make_ours
from bench.measure import record
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Runner
from moesaic.serve.core.request import Sampling
from tests.serve.random_adapters import random_adapter

SITES = ("qkv", "out")


def names_for(requests: int, adapted: int, adapters: int) -> list[str | None]:
    """The adapters of the last so many requests, in turn."""
    return [None] * (requests - adapted) + [f"a{number % adapters}" for number in range(adapted)]


def timed(engine: Engine, prompts: list[list[int]], names: list[str | None], out: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for prompt, name in zip(prompts, names, strict=True):
        engine.add(engine.request(prompt, Sampling(max_tokens=out, temperature=0.0), adapter=name))
    while engine.working:
        engine.step()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--blocks", action="store_true")
    options = parser.parse_args()
    model = make_ours(16)
    made = [random_adapter(model, f"a{seed}", options.rank, seed, 0.02, SITES) for seed in range(options.adapters)]
    rows, seed = [], 0
    for requests, adapted in ((1, 0), (1, 1), (64, 0), (64, 1), (64, 64)):
        for blocks in (False, True) if options.blocks and adapted else (False,):
            engine = Engine(model, max_requests=64)
            engine.adapters = {adapter.name: adapter for adapter in made}
            if blocks:
                engine.runner = Runner(engine)
            names = names_for(requests, adapted, options.adapters)
            out = 16 if blocks else options.out
            seconds = []
            for _ in range(2 if blocks else 4):  # the first one captures
                seed += 1
                seconds.append(timed(engine, prompts_of(requests, options.prompt, seed), names, out))
            speed = requests * out / min(seconds[1:])
            row = {"requests": requests, "adapted": adapted, "blocks": blocks, "tokens_per_s": round(speed, 1)}
            rows.append({**row, "first_run_s": round(seconds[0], 2)})
            print(rows[-1], flush=True)
            del engine
    record("gpu_adapters", rows, rank=options.rank, adapters=options.adapters, sites=list(SITES))


if __name__ == "__main__":
    main()
