"""Generation with latent attention (MLA) at DeepSeek-V3's head sizes on one GPU: long prompts, many requests, one.

    python bench/gpu_latent.py                     tokens per second, and what the prompts' attention reaches
    python bench/gpu_latent.py --profile           where the time of reading prompts goes, kernel by kernel
    python bench/gpu_latent.py --invariant         as a policy is served that a trainer learns from to the bit

128 heads of 128 + 64, values of 128, a latent of 512; 8 layers of hidden size 4096, 64 experts of 1024, 8 per token and
one shared; random weights, bfloat16, greedy. Attention is counted as 2 (192 + 128) operations for each head and each
pair of a token and one before it, however it is computed.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.measure import record
from bench.random_weights import random_model
from moesaic.model.config import Experts, Latent, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine

HEADS, RANK, PLAIN, ROTATED, VALUE, VOCAB = 128, 512, 128, 64, 128, 32000
TRAFFIC = ((8, 4096, 64), (64, 512, 128), (1, 512, 128))  # requests, tokens in, tokens out


def make_model(layers: int) -> Model:
    experts = Experts(64, 8, 1024, score="sigmoid", correction=True, shared_hidden=1024)
    config = ModelConfig(
        family="deepseek_v3",
        vocab=VOCAB,
        hidden=4096,
        attention=Latent(HEADS, RANK, PLAIN, ROTATED, VALUE, q_rank=1536),
        rope=Rope(ROTATED, interleaved=True),
        layers=tuple(Layer(experts) for _ in range(layers)),
        context=32768,
        dtype="bfloat16",
    )
    return random_model(config)


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(engine: Engine, prompts: list[list[int]], out: int) -> tuple[list[list[int]], float]:
    """(texts, seconds)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    answers = engine.generate(prompts, max_tokens=out, temperature=0.0)
    return [answer.tokens for answer in answers], time.perf_counter() - start


def kernels_of(engine: Engine, prompts: list[list[int]]) -> list[tuple[str, int, float]]:
    """(kernel, launches, milliseconds) of reading prompts."""
    engine.weights_changed()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        generate(engine, prompts, 1)
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event in found.key_averages():
        total[event.key[:80]][0] += event.count
        total[event.key[:80]][1] += event.self_device_time_total / 1000
    return sorted(((name, int(n), ms) for name, (n, ms) in total.items()), key=lambda row: -row[2])[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--result", default="gpu_latent", help="name of the result's file")
    options = parser.parse_args()
    model = make_model(options.layers)
    if options.invariant:
        model.mode = "invariant"
    engine = Engine(model, max_requests=64, cache_bytes=2 << 30)
    rows = []
    for count, length, out in TRAFFIC:
        generate(engine, prompts_of(count, length, 77), out)
        runs, prefills = [], []
        for _ in range(options.runs):
            engine.weights_changed()  # nothing that was read before counts
            runs.append(generate(engine, prompts_of(count, length, 0), out))
            assert runs[-1][0] == runs[0][0], "the same prompts gave another text"
            engine.weights_changed()
            prefills.append(generate(engine, prompts_of(count, length, 0), 1)[1])
        seconds, prefill = min(run[1] for run in runs), min(prefills)
        pairs = count * length * (length + 1) // 2
        row = {
            "requests": count,
            "in": length,
            "out": out,
            "output_tokens_per_second": round(count * out / seconds),
            "all_runs": [round(count * out / run[1]) for run in runs],
            "prefill_ms": round(prefill * 1000, 1),
            "prefill_tokens_per_second": round(count * length / prefill),
            "attention_tflop": round(pairs * HEADS * 2 * (PLAIN + ROTATED + VALUE) * options.layers / 1e12, 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.profile and count == 8:
            for name, times, ms in kernels_of(engine, prompts_of(count, length, 33)):
                print(f"{ms:9.2f} ms {times:5d}x  {name}", flush=True)
    record(options.result, rows, layers=options.layers, mode="invariant" if options.invariant else "fast")


if __name__ == "__main__":
    main()
