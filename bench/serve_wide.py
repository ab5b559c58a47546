"""One model served in six ways, on one process and on several: do 200 requests get the same answers, to the bit?

    python -m bench.serve_wide                     all, some minutes; writes bench/results/serve_wide.json
    python -m bench.serve_wide --only "tp=2" --requests 40 --family deepseek_v3

Requests are of every kind (bench/wide_load.py); every deployment but the first drafts (`--drafter suffix`), which must
not show either. Compared are texts, tool calls, finish reasons and all log-probabilities, likeliest tokens too.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure import record
from bench.wide_load import DEPLOYMENTS, SHAPES, adapter_options, ask_all, make_directory, requests
from moesaic.serve.bench.server_process import serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--family", choices=list(SHAPES), action="append", help="default: all")
    parser.add_argument("--only", choices=list(DEPLOYMENTS), action="append", help="beside one process; default: all")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    rows = []
    for family in options.family or list(SHAPES):
        with tempfile.TemporaryDirectory() as folder:
            directory = make_directory(Path(folder) / family, family)
            rows += compare(directory, family, options.requests, options.only or list(DEPLOYMENTS)[1:])
    if not options.no_record:
        print(f"wrote {record('serve_wide', rows, requests=options.requests)}")
    raise SystemExit(0 if all(row["equal"] == row["requests"] for row in rows) else 1)


def compare(directory: Path, family: str, count: int, deployments: list[str]) -> list[dict[str, Any]]:
    asked = requests(count, directory.name)
    common = ["--threads", "1", "--cache-gb", "0.05", "--invariant", *adapter_options(directory)]
    with serving(directory, common) as url:
        expected = asyncio.run(ask_all(url, asked))
    tokens = sum(len((choice.get("logprobs") or {}).get("tokens") or ()) for found in expected for choice in found)
    print(f"{family}: {count} requests to one process ({tokens} tokens of completions and prompts)", flush=True)
    rows = []
    for name in deployments:
        began = time.monotonic()
        with serving(directory, [*common, "--drafter", "suffix", *DEPLOYMENTS[name]]) as url:
            found = asyncio.run(ask_all(url, asked))
        wrong = [number for number, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other]
        rows.append(
            {
                "family": family,
                "deployment": name,
                "requests": count,
                "equal": count - len(wrong),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(f"{family}, {name}: {count - len(wrong)} of {count} equal to the bit", flush=True)
        for number in wrong[:3]:
            print(f"  {asked[number]}\n  one process: {expected[number]}\n  here: {found[number]}"[:3000])
    return rows


if __name__ == "__main__":
    main()
