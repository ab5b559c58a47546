"""Both scheduling policies in the real server, under the same load over HTTP.

    python -m bench.serve_load                     a tiny model; writes bench/results/serve_load.json
    python -m bench.serve_load out/smollm2 --rate 1 --words 60

The same Poisson arrivals, one prompt in eight of them ten times as long as the others, go to a server with FlowPrefill
and to one with chunked prefill, turn about. The deadline is a time to the first token that short prompts alone keep.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import record
from bench.soak import make_directory
from moesaic.serve.bench.load import LoadRequest, Target, poisson, random_words, report, send_all
from moesaic.serve.bench.server_process import serving

SERVERS = {"flow": ["--policy", "flow"], "chunked": ["--policy", "chunked"]}


def mixed(count: int, rate: float, words: int, max_tokens: int) -> list[LoadRequest]:
    rng = random.Random(1)
    requests = poisson(count, rate, words, max_tokens)
    return [
        LoadRequest(request.at, random_words(rng, words * 10), max_tokens) if number % 8 == 7 else request
        for number, request in enumerate(requests)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="default: a tiny random model")
    parser.add_argument("--rate", type=float, action="append", help="requests a second; default 5, 10 and 20")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--words", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--first-token", type=float, default=0.25, help="seconds that are in time")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as path:
        directory = options.directory or make_directory(Path(path) / "tiny")
        for rate in options.rate or (5.0, 10.0, 20.0):
            requests = mixed(options.requests, rate, options.words, options.max_tokens)
            for policy, flags in SERVERS.items():
                with serving(directory, [*flags, "--threads", "1"]) as url:
                    asyncio.run(send_all(url, requests[:4]))  # warm
                    results = asyncio.run(send_all(url, requests))
                found = report(requests, results, Target(options.first_token, 0.2))
                rows.append({"policy": policy, "rate": rate, **found})
    table = Table("rate", "policy", "first token p50", "p99", "between p50", "p99", "tokens/s", "in time", "failed")
    for row in rows:
        first, between = row["first_token_seconds"], row["inter_token_seconds"]
        times = [f"{value * 1000:.0f} ms" for value in (first["p50"], first["p99"], between["p50"], between["p99"])]
        share = f"{row['goodput']['share']:.0%}"
        table.add_row(
            f"{row['rate']:g}", row["policy"], *times, f"{row['tokens_per_second']:.0f}", share, str(row["failed"])
        )
    Console(width=120).print(table)
    print(f"wrote {record('serve_load', rows)}")


if __name__ == "__main__":
    main()
