"""What HTTP costs on one GPU: the same requests offline and through the server, streamed and not, from the first burst.

    python -m bench.gpu_http                       the 5.3 B mixture of the other tables, on a GPU (three minutes)
    python -m bench.gpu_http --tiny --requests 16  a tiny model on the CPU: does the program work

256 requests of 64 to 2048 tokens in and 16 to 512 out, greedy, all at once: offline through `Engine.complete`, then
over HTTP from clients in processes of their own, which do little more than note when bytes come. Prompts are new in
every run, so nothing is found in the prefix cache. The server is started with an empty cache of compiled kernels;
its first burst is shown beside later ones. Then requests of 512 in and 128 out arrive at 40 a second. Greedy texts of
random weights come with every byte, so some tokens give no text: chunks are fewer than tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.measure import record
from bench.soak import make_directory
from moesaic.serve.bench.server_process import serving

CLIENTS = 8  # processes
GENERATED = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Sent:
    at: float  # seconds after the start
    prompt: list[int]
    max_tokens: int


@dataclass
class Heard:
    chunks: list[float] = field(default_factory=list)  # when text came, in seconds after the request was due
    ended: float = 0.0  # after the start of all
    tokens: int = 0


def mixed(count: int, vocab: int, seed: int, most: int) -> list[Sent]:
    """Prompts of up to `most` tokens, answers of up to a quarter of that."""
    rng, scale = random.Random(seed), most / 2048
    lengths = [(int(rng.randint(64, 2048) * scale), int(rng.randint(16, 512) * scale)) for _ in range(count)]
    return [Sent(0.0, rng.choices(range(10, vocab), k=prompt), out) for prompt, out in lengths]


def arriving(rate: float, seconds: float, vocab: int, seed: int, prompt: int, out: int) -> list[Sent]:
    rng = random.Random(seed)
    at, requests = 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        requests.append(Sent(at, rng.choices(range(10, vocab), k=prompt), out))
    return requests


# Clients


async def ask(host: str, port: int, sent: Sent, start: float, stream: bool) -> Heard:
    heard = Heard()
    body: dict[str, Any] = {"prompt": sent.prompt, "max_tokens": sent.max_tokens, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    due = start + sent.at
    await asyncio.sleep(due - time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    tail = b""
    while part := await reader.read(1 << 16):
        now = time.perf_counter()
        if b'"text":' in part:
            heard.chunks.append(now - due)
        tail = (tail + part)[-4096:]
    heard.ended = time.perf_counter() - start
    writer.close()
    found = GENERATED.findall(tail)
    if not found:
        raise RuntimeError(f"the server answered {tail[-600:]!r}")
    heard.tokens = int(found[-1])
    return heard


def ask_all(host: str, port: int, requests: list[Sent], start: float, stream: bool) -> list[Heard]:
    async def together() -> list[Heard]:
        return await asyncio.gather(*(ask(host, port, sent, start, stream) for sent in requests))

    return asyncio.run(together())


def send(pool: ProcessPoolExecutor, url: str, requests: list[Sent], stream: bool) -> list[Heard]:
    where = urlsplit(url)
    start = time.perf_counter() + 0.5  # the clock is the machine's, the same in every process
    parts = [
        pool.submit(ask_all, where.hostname, where.port, requests[n::CLIENTS], start, stream) for n in range(CLIENTS)
    ]
    return [heard for part in parts for heard in part.result()]


def summary(what: str, heard: list[Heard]) -> dict[str, Any]:
    seconds = max(one.ended for one in heard)
    first = [one.chunks[0] * 1000 for one in heard]
    gaps = [gap for one in heard for gap in np.diff(one.chunks)]
    found = {
        "what": what,
        "seconds": round(seconds, 2),
        "output_tokens_per_second": round(sum(one.tokens for one in heard) / seconds),
        "ttft_p50_ms": round(float(np.percentile(first, 50))),
        "ttft_p99_ms": round(float(np.percentile(first, 99))),
        "gap_p99_ms": round(float(np.percentile(gaps, 99)) * 1000) if gaps else None,
        "longest_gap_ms": round(max(gaps) * 1000) if gaps else None,
        "chunks": sum(len(one.chunks) for one in heard),
        "tokens": sum(one.tokens for one in heard),
    }
    print(json.dumps(found), flush=True)
    return found


# The model


def make_large(path: Path, layers: int) -> int:
    """The directory of a random model with a tokenizer that has a text for every token."""
    from bench.gpu_train import VOCAB, make_ours
    from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer
    from moesaic.model.directory import save

    rng = random.Random(0)
    words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7))) for _ in range(60_000))
    save(make_ours(layers), path)
    save_tokenizer(train_tokenizer([" ".join(words)], VOCAB), path)
    return VOCAB


def offline(directory: str, requests: list[list[tuple[list[int], int]]], options: dict[str, Any]) -> list[float]:
    """Output tokens a second of each list of (prompt, tokens out)."""
    import moesaic
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.request import Sampling

    engine = Engine(moesaic.load(directory), **options)
    rates = []
    for burst in requests:
        made = [
            engine.request(prompt, Sampling(max_tokens=out, temperature=0.0, ignore_eos=True)) for prompt, out in burst
        ]
        start = time.perf_counter()
        engine.complete(made)
        rates.append(sum(request.written for request in made) / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to try the program")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--rate-seconds", type=float, default=10.0)
    parser.add_argument("--cache-gb", type=float, default=40.0)
    parser.add_argument("--model", type=Path, help="where the model is, or is to be, kept")
    parser.add_argument("--result", default="gpu_http", help="name of the result's file")
    parser.add_argument("--serve-option", action="append", default=[])
    options = parser.parse_args()
    count, rows = options.requests, []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as path, ProcessPoolExecutor(CLIENTS, mp_context=spawn) as pool:
        directory = options.model or Path(path) / "model"
        if options.tiny:
            make_directory(directory)
            vocab, most, flags = 300, 256, ["--cache-gb", "0.05", "--threads", "1"]
        else:
            if not directory.exists():
                with ProcessPoolExecutor(1, mp_context=spawn) as alone:  # whose memory is free again after it
                    alone.submit(make_large, directory, options.layers).result()
            vocab, most, flags = 32000, 2048, ["--device", "cuda", "--cache-gb", str(options.cache_gb)]
        list(pool.map(abs, range(CLIENTS)))
        environment = {"TRITON_CACHE_DIR": f"{path}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{path}/inductor"}
        os.environ.update(environment)
        began = time.perf_counter()
        with serving(directory, [*flags, "--max-requests", str(count), *options.serve_option]) as url:
            ready = time.perf_counter() - began
            print(f"ready after {ready:.1f} s", flush=True)
            rows.append(summary("first burst, streamed", send(pool, url, mixed(count, vocab, 1, most), True)))
            for number in range(options.bursts):
                requests = mixed(count, vocab, 10 + number, most)
                rows.append(summary("burst, streamed", send(pool, url, requests, True)))
            for number in range(options.bursts):
                requests = mixed(count, vocab, 20 + number, most)
                rows.append(summary("burst, not streamed", send(pool, url, requests, False)))
            requests = arriving(options.rate, options.rate_seconds, vocab, 30, most // 4, most // 16)
            rows.append(summary(f"{options.rate:g} requests a second", send(pool, url, requests, True)))
        began = time.perf_counter()
        with serving(directory, [*flags, "--max-requests", str(count), *options.serve_option]) as url:
            again = time.perf_counter() - began
            print(f"ready again after {again:.1f} s", flush=True)
            rows.append(
                summary("first burst, kernels compiled before", send(pool, url, mixed(count, vocab, 2, most), True))
            )
        bursts = [
            [(sent.prompt, sent.max_tokens) for sent in mixed(count, vocab, 10 + number, most)]
            for number in (90, *range(options.bursts))
        ]
        engine_options = {
            "max_requests": count,
            "cache_bytes": int(float(flags[flags.index("--cache-gb") + 1]) * 2**30),
        }
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            rates = alone.submit(offline, str(directory), bursts, engine_options).result()[1:]
    best = {
        what: max(row["output_tokens_per_second"] for row in rows if row["what"] == what)
        for what in ("burst, streamed", "burst, not streamed")
    }
    ratios = {what: round(rate / max(rates), 3) for what, rate in best.items()}
    print(json.dumps({"offline": [round(rate) for rate in rates], "over offline": ratios}), flush=True)
    if not options.tiny:
        facts = {"offline_tokens_per_second": [round(rate) for rate in rates], "over_offline": ratios}
        print(record(options.result, rows, **facts, ready_seconds=round(ready, 1), ready_again_seconds=round(again, 1)))


if __name__ == "__main__":
    main()
