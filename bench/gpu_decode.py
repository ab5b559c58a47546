"""Generation on one GPU through `moesaic.Engine`: prompts in, answers out; beside transformers' static cache.

    python bench/gpu_decode.py                     1, 128 and 512 requests of 512 in, 128 out
    python bench/gpu_decode.py --profile           where a step's time goes, kernel by kernel
    python bench/gpu_decode.py --requests 64 --prompt 4096 --cache-dtype float8 --no-peer --result gpu_decode_float8
    python bench/gpu_decode.py --requests 1 128 --bits 4 --no-peer --result gpu_decode_4bits
    python bench/gpu_decode.py --requests 1 128 512 --float8 --no-peer --result gpu_decode_w8a8
    python bench/gpu_decode.py --glm --requests 1 8 64 --result gpu_decode_glm      8 layers of GLM-4.5-Air's widths
    python bench/gpu_decode.py --start             only how long it takes from nothing to the first token

Tokens per second count the output over the whole time, reading prompts included. Random weights, bfloat16, greedy;
every request comes at once, and no run finds a prompt read before. The best of three runs, and all of them.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import time

STARTED = time.perf_counter()

import torch  # noqa: E402  the clock starts before

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_train import VOCAB, make_ours, make_peer  # noqa: E402
from bench.measure import record  # noqa: E402
from bench.random_weights import random_model  # noqa: E402
from moesaic.kernels.grid import Grid  # noqa: E402
from moesaic.kernels.triton.quantized.weight import gpu_weight  # noqa: E402
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope  # noqa: E402
from moesaic.model.directory import install  # noqa: E402
from moesaic.model.transformer import Model  # noqa: E402
from moesaic.serve.core.engine import Engine  # noqa: E402
from moesaic.serve.core.request import Sampling  # noqa: E402
from moesaic.serve.float8 import round_to_float8  # noqa: E402


def make_glm(layers: int) -> Model:
    """GLM-4.5-Air's widths and vocabulary, and a shared expert; random weights."""
    experts = Experts(128, 8, 1408, score="sigmoid", correction=True, shared_hidden=1408)
    config = ModelConfig(
        family="glm4_moe",
        vocab=151552,
        hidden=4096,
        attention=GroupedQuery(96, 8, 128, qkv_bias=True),
        rope=Rope(64, theta=1e6),
        layers=(Layer(experts),) * layers,
        context=8192,
        dtype="bfloat16",
    )
    return random_model(config)


@torch.no_grad()
def in_few_bits(model: Model, bits: int) -> None:
    """All matrices but routers' and the embedding, rounded to the nearest in groups of 128."""
    grid = Grid(bits, 128, True)
    for name, weight in list(model.named_parameters()):
        if weight.dim() == 1 or "router" in name or name == "embed":
            continue
        stacked = weight.dim() == 3
        matrices = [grid.matrix(one.float()) for one in (weight if stacked else [weight])]
        made = gpu_weight(torch.nn.ModuleList(matrices) if stacked else matrices[0], torch.bfloat16)
        install(model, name, made, torch.bfloat16)


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """The first of many, so that fewer are always among more."""
    return torch.randint(VOCAB, (1024, length), generator=torch.Generator().manual_seed(seed))[:count].tolist()


def generate(engine: Engine, prompts: list[list[int]], out: int) -> tuple[list[list[int]], float]:
    """(texts, seconds)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    answers = engine.generate(prompts, max_tokens=out, temperature=0.0)
    return [answer.tokens for answer in answers], time.perf_counter() - start


def decode_ms(engine: Engine, prompts: list[list[int]], out: int) -> float:
    """Milliseconds per step once all prompts are read."""
    requests = [engine.request(prompt, Sampling(max_tokens=out, temperature=0.0)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while any(request.written < 2 for request in requests):
        engine.step()
    begun, before = time.perf_counter(), requests[-1].written
    while all(request.finish_reason is None for request in requests):
        engine.step()
    steps = requests[-1].written - before
    seconds = time.perf_counter() - begun
    while engine.working:
        engine.step()
    return seconds / steps * 1000


def profile(engine: Engine, prompts: list[list[int]], steps: int = 10) -> list[tuple[str, int, float]]:
    """(kernel, launches, microseconds) per step of answers."""
    requests = [engine.request(prompt, Sampling(max_tokens=2 * steps + 40, temperature=0.0)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while any(request.written < 4 for request in requests):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for request in requests:
        engine.abort(request)
    while engine.step():
        pass
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event in found.key_averages():
        total[event.key[:90]][0] += event.count / steps
        total[event.key[:90]][1] += event.self_device_time_total / steps
    return sorted(((name, round(n, 1), us) for name, (n, us) in total.items()), key=lambda row: -row[2])[:24]


def peer_alone(peer, prompt: list[int], out: int) -> tuple[list[int], float]:
    """One sequence, static cache, the forward compiled as transformers advises: (text, seconds)."""
    peer.eval()
    peer.config.use_cache = True
    options = {"max_new_tokens": out, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    given = torch.tensor([prompt], device="cuda")
    for _ in range(2):
        peer.generate(given, cache_implementation="static", **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    text = peer.generate(given, cache_implementation="static", **options)
    torch.cuda.synchronize()
    return text[0, len(prompt) :].tolist(), time.perf_counter() - start


def parting(model, prompt: list[int], own: list[int], text: list[int]) -> dict[str, float]:
    """Where two greedy texts part, and how much likelier our model thinks its own token there (nats)."""
    same = next((i for i, (one, other) in enumerate(zip(text, own)) if one != other), len(own))
    if same == len(own):
        return {"same_text_until": same}
    mine, other = (model.logprobs([prompt + own[:same] + [token]])[0][-1].item() for token in (own[same], text[same]))
    return {"same_text_until": same, "ahead_there": round(mine - other, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 128, 512])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--glm", action="store_true", help="another model, without a peer")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--cache-dtype", help="of keys and values; else bfloat16")
    parser.add_argument("--bits", type=int, default=16, help="of the weights: 4, 8 or 16")
    parser.add_argument("--float8", action="store_true", help="weights and inputs of matmuls in float8")
    parser.add_argument("--result", default="gpu_decode", help="name of the result's file")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    model = make_glm(8) if options.glm else make_ours(options.layers)
    if options.bits < 16:
        in_few_bits(model, options.bits)
    if options.float8:
        round_to_float8(model)
    built = time.perf_counter() - STARTED
    most = max(options.requests)
    memory = (most + 8) * (options.prompt + options.out + 16) << 15
    engine = Engine(model, max_requests=most, cache_bytes=memory, cache_dtype=options.cache_dtype)
    generate(engine, prompts_of(1, options.prompt, 99), 1)
    first = {"built_seconds": round(built, 1), "first_token_seconds": round(time.perf_counter() - STARTED, 1)}
    print(json.dumps(first), flush=True)
    if options.start:
        return
    rows, texts = [], {}
    for count in options.requests:
        begun = time.perf_counter()
        generate(engine, prompts_of(count, options.prompt, 77), options.out)
        warming = time.perf_counter() - begun
        runs = []
        for number in range(3):
            engine.weights_changed()  # nothing that was read before counts
            runs.append(generate(engine, prompts_of(count, options.prompt, 0), options.out))
            assert runs[number][0] == runs[0][0], "the same prompts gave another text"
        texts[count], seconds = min(runs, key=lambda run: run[1])
        step = decode_ms(engine, prompts_of(count, options.prompt, 55), options.out)
        row = {
            "who": "moesaic",
            "requests": count,
            "output_tokens_per_second": round(count * options.out / seconds),
            "all_runs": [round(count * options.out / run[1]) for run in runs],
            "step_ms": round(step, 3),
            "reading_ms": round((seconds - step / 1000 * (options.out - 1)) * 1000, 1),
            "first_use_seconds": round(warming, 1),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.profile:
            for name, times, us in profile(engine, prompts_of(count, options.prompt, 33)):
                print(f"{us:9.1f} us {times:7.1f}x  {name}", flush=True)
    counts = options.requests
    same = [all(texts[counts[0]][i] == texts[n][i] for i in range(counts[0])) for n in counts[1:]]
    facts = {
        "layers": len(model.layers),
        "prompt": options.prompt,
        "out": options.out,
        "bits": "float8" if options.float8 else options.bits,
        "cache_dtype": options.cache_dtype or "bfloat16",
        "same_text_in_batches_of": dict(zip(map(str, counts[1:]), same, strict=True)),
        **first,
    }
    print(json.dumps(facts), flush=True)
    record(options.result, rows, **facts)
    if options.no_peer or options.glm:
        return
    text, seconds = peer_alone(make_peer(options.layers, model), prompts_of(1, options.prompt, 0)[0], options.out)
    own = texts[counts[0]][0]
    row = {
        "who": "transformers, static cache, compiled",
        "requests": 1,
        "output_tokens_per_second": round(options.out / seconds),
        **parting(model, prompts_of(1, options.prompt, 0)[0], own, text),
    }
    print(json.dumps(row), flush=True)
    record(options.result, [*rows, row], **facts)


if __name__ == "__main__":
    main()
