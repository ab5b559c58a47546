"""What a compact KV cache costs and saves in time: milliseconds of processor time a generated token, every policy
beside the full cache (`python -m bench.kv_cache speed`).

Time depends on how much is cached, not on what: so the cache is filled with one number, scores are drawn, the policy
prunes by them, and tokens are generated from there, prunings included. Policies and the full cache take turns, token by
token, in one thread; what other programs do at the time falls on all of them.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch

from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.request import Request, Sampling


def row_bytes(model: Model) -> int:
    """What a token's keys and values take."""
    numbers = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values())
    return numbers * model.dtype.itemsize


def fill_cache(engine: Engine) -> None:
    for slabs in engine.cache.layers:
        for slab in slabs.values():
            slab.fill_(0.01)


def in_cache(engine: Engine, draw: random.Random, length: int, tokens: int) -> Request:
    """A request whose prompt is in the cache, pruned by scores that are drawn."""
    prompt = [draw.randrange(engine.model.config.vocab) for _ in range(length)]
    request = engine.request(prompt, Sampling(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True))
    engine.add(request)
    with torch.inference_mode():
        engine.page_pool.tokens_until_pruning(request, 1)
        assert engine.page_pool.grow(request, length), "the cache is too small"
        request.computed = length
        if (compact := request.compact) is not None:
            compact.begin(length, request.pages)
            compact.scores_LNM.uniform_().pow_(8)
            if compact.recorded_queries:
                compact.room_for_queries(compact.store.query_heads).normal_()
            engine.page_pool.after_forward(request)
    request.append(0, set())
    return request


def filled(model: Model, policy: KVPolicy | None, length: int, tokens: int) -> tuple[Engine, Request]:
    """An engine with one request, whose prompt is in the cache."""
    memory = row_bytes(model) * (length + tokens + 64)
    engine = Engine(model, kv_policy=policy, cache_bytes=memory, max_requests=1, reuse_prefixes=False, seed=0)
    fill_cache(engine)
    return engine, in_cache(engine, random.Random(0), length, tokens)


def measured(model: Model, policies: dict[str, KVPolicy | None], length: int, tokens: int) -> list[dict[str, Any]]:
    before, threads = model.config, torch.get_num_threads()
    model.config = replace(before, context=max(before.context, length + tokens + 64))
    torch.set_num_threads(1)
    try:
        runs = {entry: filled(model, policy, length, tokens) for entry, policy in policies.items()}
        pages = {entry: engine.page_pool.in_use for entry, (engine, _) in runs.items()}
        seconds: dict[str, list[float]] = {entry: [] for entry in policies}
        for _ in range(tokens):
            for entry, (engine, _) in runs.items():
                begun = time.process_time()
                engine.step()
                seconds[entry].append(time.process_time() - begun)
    finally:
        model.config = before
        torch.set_num_threads(threads)
    full = mean(seconds["full"])
    return [
        {
            "entry": entry,
            "length": length,
            "tokens": tokens,
            "cpu_ms_per_token": 1e3 * mean(own),
            "median_cpu_ms": 1e3 * sorted(own)[len(own) // 2],
            "times_faster_than_full": full / mean(own),
            "pages": pages[entry] / -(-length // 16),
        }
        for entry, own in seconds.items()
    ]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
