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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import moesaic
from bench.gpu_train import VOCAB, make_ours
from bench.measure import record
from bench.soak import make_directory
from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer
from moesaic.model.directory import save
from moesaic.serve.bench.server_process import serving
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling

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
    """Prompts of up to `most` tokens, answers of up to a quarter; the same lengths in every run, and other tokens."""
    rng, scale = random.Random(0), most / 2048
    lengths = [(int(rng.randint(64, 2048) * scale), int(rng.randint(16, 512) * scale)) for _ in range(count)]
    tokens = random.Random(seed)
    return [Sent(0.0, tokens.choices(range(10, vocab), k=prompt), out) for prompt, out in lengths]


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


def make_large(path: Path, layers: int) -> None:
    """The directory of a random model with a tokenizer that has a text for every token."""
    rng = random.Random(0)
    words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7))) for _ in range(60_000))
    save(make_ours(layers), path)
    save_tokenizer(train_tokenizer([" ".join(words)], VOCAB), path)


def offline(directory: str, bursts: list[list[Sent]], **options: Any) -> list[float]:
    """Output tokens a second of each burst."""
    engine = Engine(moesaic.load(directory), **options)
    rates = []
    for burst in bursts:
        made = [
            engine.request(sent.prompt, Sampling(max_tokens=sent.max_tokens, temperature=0.0, ignore_eos=True))
            for sent in burst
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
    parser.add_argument("--no-restart", action="store_true", help="only once, from no compiled kernels")
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
            vocab, most, flags = VOCAB, 2048, ["--device", "cuda", "--cache-gb", str(options.cache_gb)]
        list(pool.map(abs, range(CLIENTS)))  # so that they have started
        os.environ |= {"TRITON_CACHE_DIR": f"{path}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{path}/inductor"}
        flags += ["--max-requests", str(count), *options.serve_option]
        ready: list[float] = []

        @contextmanager
        def server() -> Iterator[str]:
            began = time.perf_counter()
            with serving(directory, flags) as url:
                ready.append(round(time.perf_counter() - began, 1))
                print(f"ready after {ready[-1]} s", flush=True)
                yield url

        def burst(what: str, url: str, seed: int, stream: bool = True) -> None:
            rows.append(summary(what, send(pool, url, mixed(count, vocab, seed, most), stream)))

        with server() as url:
            burst("first burst, streamed", url, 1)
            for number in range(options.bursts):
                burst("burst, streamed", url, 10 + number)
            for number in range(options.bursts):
                burst("burst, not streamed", url, 20 + number, stream=False)
            requests = arriving(options.rate, options.rate_seconds, vocab, 30, most // 4, most // 16)
            rows.append(summary(f"{options.rate:g} requests a second", send(pool, url, requests, True)))
        if not options.no_restart:
            with server() as url:
                burst("first burst, kernels compiled before", url, 2)
        bursts = [mixed(count, vocab, 30 + number, most) for number in range(options.bursts + 1)]
        cache = int(float(flags[flags.index("--cache-gb") + 1]) * 2**30)
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            rates = alone.submit(offline, str(directory), bursts, max_requests=count, cache_bytes=cache).result()[1:]
    best = {
        what: max(row["output_tokens_per_second"] for row in rows if row["what"] == what)
        for what in ("burst, streamed", "burst, not streamed")
    }
    ratios = {what: round(rate / max(rates), 3) for what, rate in best.items()}
    facts = {"offline_tokens_per_second": [round(rate) for rate in rates], "over_offline": ratios}
    print(json.dumps(facts), flush=True)
    if not options.tiny:
        print(record(options.result, rows, **facts, ready_seconds=ready))


if __name__ == "__main__":
    main()
