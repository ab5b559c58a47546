"""Sparse attention (DSA: DeepSeek-V3.2, GLM-5) on one GPU beside the same model without an indexer: prompts, decode.

    python bench/gpu_dsa.py                        prompts of 4k to 32k tokens, decode behind 32k
    python bench/gpu_dsa.py --peer                 and transformers' own forward of its DSA, where it fits
    python bench/gpu_dsa.py --profile              where the time goes, kernel by kernel

DeepSeek-V3.2's attention (128 heads of 128 + 64, values of 128, a latent of 512; 64 index heads of 128, top-k 2,048);
8 layers of hidden size 4096, 64 experts of 1024, 8 per token and one shared; random weights, bfloat16, greedy. The
indexer's floor is 2 * 64 * 128 operations for every pair of a token and one before it, at what the tensor cores can do.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
import time
from dataclasses import replace
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_latent import HEADS, PLAIN, RANK, ROTATED, VALUE, VOCAB, generate, kernels_of, prompts_of
from bench.measure import record
from bench.random_weights import random_model
from moesaic.model.config import Experts, Indexer, Latent, Layer, ModelConfig, Rope
from moesaic.serve.core.engine import Engine
from moesaic.serve.gpu.overlap import OverlapLoop

INDEX_HEADS, INDEX_SIZE, TOPK = 64, 128, 2048
LENGTHS, CONTEXT = (4096, 16384, 32768), 33280
BATCHES, AFTER = (1, 16), 32768  # of decode, behind so many tokens
PEAK = 989e12  # bfloat16 operations a second of an H200


def config_of(layers: int, sparse: bool) -> ModelConfig:
    attention = Latent(HEADS, RANK, PLAIN, ROTATED, VALUE, q_rank=1536)
    if sparse:
        attention = replace(attention, indexer=Indexer(INDEX_HEADS, INDEX_SIZE, TOPK, interleaved=False))
    experts = Experts(64, 8, 1024, score="sigmoid", correction=True, shared_hidden=1024)
    return ModelConfig(
        family="deepseek_v32" if sparse else "deepseek_v3",
        vocab=VOCAB,
        hidden=4096,
        attention=attention,
        rope=Rope(ROTATED, interleaved=True),
        layers=tuple(Layer(experts, index="full" if sparse else None) for _ in range(layers)),
        context=CONTEXT,
        dtype="bfloat16",
    )


def prefill_seconds(engine: Engine, length: int, runs: int) -> float:
    prompt = prompts_of(1, length, 5)
    found = []
    for _ in range(runs + 1):  # the first captures
        engine.weights_changed()  # nothing that was read before counts
        found.append(generate(engine, prompt, 1)[1])
    return min(found[1:])


def decode_seconds(engine: Engine, requests: int, tokens: int) -> float:
    """A step, of requests whose prompts were read before."""
    prompts = prompts_of(requests, AFTER, 9)
    for out in (1, 4):  # the prompts are read, the graphs captured
        generate(engine, prompts, out)
    short, long = (min(generate(engine, prompts, out)[1] for _ in range(2)) for out in (4, 4 + tokens))
    return (long - short) / tokens


def measured(sparse: bool, options: argparse.Namespace) -> dict[str, Any]:
    model = random_model(config_of(options.layers, sparse))
    engine = Engine(model, max_requests=max(BATCHES), cache_bytes=8 << 30)
    assert isinstance(engine.runner, OverlapLoop)
    row: dict[str, Any] = {"attention": "sparse" if sparse else "dense"}
    for length in options.lengths:
        row[f"prefill_{length}_ms"] = round(1000 * prefill_seconds(engine, length, options.runs), 1)
        print(json.dumps(row), flush=True)
        if options.profile:
            for name, times, ms in kernels_of(engine, prompts_of(1, length, 6)):
                print(f"{ms:9.2f} ms {times:5d}x  {name}", flush=True)
    for requests in options.batches:
        row[f"decode_{requests}_ms"] = round(1000 * decode_seconds(engine, requests, options.tokens), 3)
        print(json.dumps(row), flush=True)
        if options.profile:
            prompts = prompts_of(requests, AFTER, 9)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                generate(engine, prompts, 17)
            events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)[:14]
            for event in events:
                print(f"{event.self_device_time_total / 1000:9.2f} ms {event.count:5d}x  {event.key[:80]}", flush=True)
    return row


def peer_seconds(layers: int, length: int, runs: int) -> float | None:
    """transformers' forward of one prompt, which holds every head's scores of all pairs in float32."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "deepseek_v32", vocab_size=VOCAB, hidden_size=4096, intermediate_size=1024, moe_intermediate_size=1024,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=1536,
        kv_lora_rank=RANK, qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTATED, v_head_dim=VALUE, n_routed_experts=64,
        num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=0, n_group=1, topk_group=1,
        index_n_heads=INDEX_HEADS, index_head_dim=INDEX_SIZE, index_topk=TOPK, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.tensor(prompts_of(1, length, 5), device="cuda")
    found = []
    try:
        with torch.no_grad():
            for _ in range(runs + 1):
                torch.cuda.synchronize()
                start = time.perf_counter()
                model(tokens, logits_to_keep=1, use_cache=False)
                torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
    except torch.cuda.OutOfMemoryError:
        return None
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--tokens", type=int, default=64, help="decoded, when decode is timed")
    parser.add_argument("--only", choices=("sparse", "dense"))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--result", default="gpu_dsa", help="name of the result's file")
    options = parser.parse_args()
    rows = []
    for sparse in (True, False):
        if options.only == ("dense" if sparse else "sparse"):
            continue
        rows.append(measured(sparse, options))
        gc.collect()
        torch.cuda.empty_cache()
    for length in options.lengths:
        pairs = length * (length + 1) // 2
        floor = pairs * 2 * INDEX_HEADS * INDEX_SIZE * options.layers / PEAK
        seconds = peer_seconds(options.layers, length, options.runs) if options.peer and length <= 4096 else None
        peer = {} if seconds is None else {"transformers_ms": round(1000 * seconds, 1)}
        rows.append({"tokens": length, "indexer_floor_ms": round(1000 * floor, 2), **peer})
        print(json.dumps(rows[-1]), flush=True)
    record(options.result, rows, layers=options.layers)


if __name__ == "__main__":
    main()
