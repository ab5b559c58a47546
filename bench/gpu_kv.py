"""KV policies on one GPU: milliseconds a token with a quarter of the cache, in CUDA graphs, beside the full cache.

    python bench/gpu_kv.py                         about 6 minutes on an H200
    python bench/gpu_kv.py --requests 1 --lengths 1024 16384        two of them
    python bench/gpu_kv.py --tiny                  on a CPU, in seconds: every line runs, and no number means anything

Llama-3-8B's widths and layers with random weights, bfloat16. Time depends on how much is cached, not on what: the cache
is filled with one number, scores are drawn, the policy prunes by them, and tokens are generated from there. `full` is
the engine without a policy, whose steps overlap; `snapkv` and `sinks` (pruned every 64 tokens) run as graphs of their
own; `h2o`, which scores every token, and `4 bits` run layer by layer. `attention` is the kernel alone: all heads of a
layer over the rows of the full cache, and over a quarter of them. Goals at 25 %: no slower at 1,024 tokens, 1.5 times
as fast at 16,384. Rows go to bench/results/gpu_kv.json as they come; what fails is written down and the rest goes on.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.kv_speed import fill_cache, in_cache, row_bytes
from bench.measure import record
from bench.random_weights import random_model
from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.kv_policies.h2o import H2O
from moesaic.serve.core.kv_policies.quantized import Quantized
from moesaic.serve.core.kv_policies.sinks import Sinks
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from moesaic.serve.core.request import Request

POLICIES: dict[str, KVPolicy | None] = {
    "full": None,
    "snapkv 25%": SnapKV(share=0.25),
    "sinks 25%": Sinks(share=0.25),
    "h2o 25%": H2O(share=0.25),
    "4 bits": Quantized(bits=4),
}
BY_LAYER = ("h2o 25%", "4 bits")  # these are slow, and one request says it
BYTES = 90 << 30  # of a cache


def make_model(tiny: bool, device: torch.device) -> Model:
    hidden, ffn, layers, heads, vocab = (64, 96, 2, (4, 2), 256) if tiny else (4096, 14336, 32, (32, 8), 128256)
    config = ModelConfig(
        family="llama",
        vocab=vocab,
        hidden=hidden,
        attention=GroupedQuery(*heads, hidden // heads[0]),
        rope=Rope(hidden // heads[0], theta=5e5),
        layers=(Layer(Dense(ffn)),) * layers,
        context=32768,
        dtype="float32" if tiny else "bfloat16",
    )
    return random_model(config, device).requires_grad_(False)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def filled(model: Model, policy: KVPolicy | None, count: int, length: int, tokens: int) -> tuple[Engine, list[Request]]:
    """An engine whose requests' prompts are in the cache."""
    memory = row_bytes(model) * (length + tokens + 64) * count
    if policy is not None:  # one prompt at a time is there whole
        memory = row_bytes(model) * (length + 64 + (count - 1) * ((length + tokens) // 3 + 256))
        memory = row_bytes(model) * (length + tokens + 64) * count if isinstance(policy, Quantized) else memory
    engine = Engine(model, kv_policy=policy, cache_bytes=memory, max_requests=count, reuse_prefixes=False, seed=0)
    fill_cache(engine)
    draw = random.Random(0)
    requests = [in_cache(engine, draw, length, tokens) for _ in range(count)]
    return engine, requests


def decoded(model: Model, policy: KVPolicy | None, count: int, length: int, tokens: int) -> dict[str, Any]:
    """The median and mean time of a step of all requests, after a few that compile and capture."""
    engine, requests = filled(model, policy, count, length, tokens)
    pages = engine.page_pool.in_use
    warm = max(3, tokens // 4)
    while min(request.written for request in requests) <= warm:
        engine.step()
    synchronize()
    times, begun, before = [], time.perf_counter(), requests[0].written
    while all(request.finish_reason is None for request in requests):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    synchronize()
    mean = (time.perf_counter() - begun) / max(1, requests[0].written - before)
    while engine.working:
        engine.step()
    return {
        "ms": round(1e3 * mean, 3),
        "median_ms": round(1e3 * statistics.median(times), 3),
        "pages": round(pages / (count * -(-length // engine.page_pool.size)), 3),
        "runner": type(engine.runner).__name__,
    }


def attention_us(count: int, length: int, share: float, tiny: bool) -> float:
    """The kernel over chosen rows of 8 key heads, or over pages (share 1): microseconds in a CUDA graph."""
    from bench.gpu_linear import microseconds
    from moesaic.kernels.cuda.retained_step import in_one_page
    from moesaic.kernels.triton.attention.paged import attend
    from moesaic.kernels.triton.attention.paged_rows import Rows

    N, G, C = 8, 4, 128
    keys, values = (torch.randn(count * length, N, C, device="cuda").bfloat16() for _ in range(2))
    q_THC = torch.randn(count, N * G, C, device="cuda").bfloat16()
    if share == 1:
        size = 16
        pages = torch.arange(count * length // size, device="cuda").int().view(count, -1)
        tiles = torch.tensor([[number, 1] for number in range(count)], device="cuda").int()
        last = torch.full((count,), length - 1, device="cuda", dtype=torch.int32)
        rows = Rows(last, torch.arange(count, device="cuda").int(), pages, length, decode_X2=tiles)
        by_page = [x.view(-1, size, N, C) for x in (keys, values)]
        return microseconds(lambda _: attend(q_THC, *by_page, rows, C**-0.5), 4)
    most = int(share * length)
    chosen = torch.stack([torch.randperm(count * length, device="cuda")[:most] for _ in range(count * N)])
    head = torch.arange(count * N, device="cuda") % N
    chosen = (chosen.sort(-1).values * N + head[:, None]).int().contiguous()
    rows = in_one_page(torch.full((count * N,), most - 1, device="cuda"), most)
    flat = [x.view(1, -1, 1, C) for x in (keys, values)]
    return microseconds(lambda _: attend(q_THC.view(-1, G, C), *flat, rows, C**-0.5, chosen_TK=chosen), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, recorded nowhere")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.tiny:
        options.lengths, options.requests, options.tokens = [96, 400], [1, 2], 12
    model = make_model(options.tiny, device)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []

    def save() -> None:
        if not options.tiny:
            record("gpu_kv", rows, failed=failed, tokens=options.tokens, layers=len(model.layers))

    def tried(what: str, run: Callable[[], dict[str, Any]]) -> None:
        try:
            rows.append(run())
            print(rows[-1], flush=True)
        except Exception as error:
            failed.append(f"{what}: {type(error).__name__}: {error}"[:300])
            traceback.print_exc()
        save()
        gc.unfreeze()  # an engine of graphs keeps what there is out of collections, the last one's cache too
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def one(name: str, count: int, length: int) -> dict[str, Any]:
        row = {"policy": name, "requests": count, "length": length}
        row |= decoded(model, POLICIES[name], count, length, options.tokens)
        wanted = {"policy": "full", "requests": count, "length": length}
        full = next((one["ms"] for one in rows if wanted.items() <= one.items()), None)
        return row | {"times_full": round(full / row["ms"], 3) if full else None}

    for count in options.requests:
        for length in options.lengths:
            for name in options.policies:
                if row_bytes(model) * (length + 256) * count > BYTES or (name in BY_LAYER and count > 1):
                    continue
                tried(f"{name}, {count} x {length}", lambda n=name, c=count, s=length: one(n, c, s))  # type: ignore[misc]
            if options.tiny:
                continue

            def attention(count: int = count, length: int = length) -> dict[str, Any]:
                full, quarter = (attention_us(count, length, share, options.tiny) for share in (1, 0.25))
                row = {"attention": "one layer", "requests": count, "length": length}
                return row | {
                    "full_us": round(full, 2),
                    "quarter_us": round(quarter, 2),
                    "times": round(full / quarter, 3),
                }

            tried(f"attention, {count} x {length}", attention)
    print("failed:", failed or "nothing", flush=True)
    if options.tiny and failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
