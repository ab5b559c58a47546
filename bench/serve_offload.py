"""Serving with experts, or all layers, outside the memory that computes: tokens/s and memory against all in memory.

    python -m bench.serve_offload                       on a CPU from disk, some minutes
    python -m bench.serve_offload --device cuda         on an H200 with 128 GiB of host memory, below six minutes
    python -m bench.serve_offload --device cuda --rows large          only the model that does not fit
    python -m bench.serve_offload --device cuda --tiny  the same program in seconds, to see that it runs

Rows: `memory` has all weights where they compute; `experts-N` a cache of N % of the experts; `weights` streams layers.
One stream and a batch decode after short prompts, sampled at temperature 1: greedily, a model of random weights soon
repeats itself, and its experts. Every row must give the greedy tokens of `memory` for a few prompts: it is checked.
Weights are random, so experts are chosen evenly, and without predictions a cache of N % would hit little more than N %:
trained routers are more uneven. How well the next layer's router predicts is a property of these weights too.

On a CPU each row is a process of its own, and they take turns: `ratio` is the median over rounds of a row's tokens/s by
those of `memory` in the same round, tokens/s are those of the best round. A row's memory is how far its peak resident
size grew from before the model was loaded. Files lie in the page cache, so "disk" is a copy from there; rows `-cold`
make it forget what they have read.

On a GPU the model has the shape of Qwen3-30B-A3B (57 GiB in bf16), experts wait in pinned host memory, and each row is
held to a smaller GPU's memory (`gpu_gib`, torch.cuda.set_per_process_memory_fraction), as all of it would fit on an
H200. Row `large` truly does not fit: 152 GiB of GLM-4.5-Air's shape with 35 layers, part of its experts on the GPU only
and the others in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench.measure import machine, record
from bench.offload_cpu import TINY_SHAPE, cpu_row, on_cpu
from bench.offload_gpu import in_processes, on_gpu

CPU_ROWS = [
    "memory", "experts-100", "experts-50", "experts-25", "experts-12", "experts-25-cold", "weights", "weights-cold",
]  # fmt: skip
GPU_ROWS = ["memory", "experts-100", "experts-50", "experts-25", "experts-12", "weights", "large"]
CPU_SHAPE = dict(layers=12, hidden=512, experts=32, per_token=4, width=512, heads=(8, 2, 64), vocab=8192)
GPU_SHAPE = dict(layers=48, hidden=2048, experts=128, per_token=8, width=768, heads=(32, 4, 128), vocab=32000)
LARGE_SHAPE = dict(layers=35, hidden=4096, experts=128, per_token=8, width=1408, heads=(96, 8, 128), vocab=32000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="that one stream generates")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--batch-tokens", type=int, default=9, help="that each sequence of a batch generates")
    parser.add_argument("--rounds", type=int, help="of which the best counts")
    parser.add_argument("--cache-gib", type=float, help="of the KV cache")
    parser.add_argument("--fixed", type=int, default=44, help="experts of 128 that row large has on the GPU only")
    parser.add_argument("--cached", type=int, default=96, help="experts of 128 for which row large has room on the GPU")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no further row begins, on a GPU")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--in-process", action="store_true", help="run the GPU's program on a CPU")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--folder", help="for the model on a CPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpu = options.device.startswith("cuda") or options.in_process
    options.shape = TINY_SHAPE if options.tiny else GPU_SHAPE if gpu else CPU_SHAPE
    options.large_shape = TINY_SHAPE if options.tiny else LARGE_SHAPE
    options.rows = options.rows or (GPU_ROWS if gpu else CPU_ROWS)
    options.batch = options.batch or (64 if gpu and not options.tiny else 16)
    options.rounds = options.rounds or (1 if gpu else 3)
    options.cache_gib = options.cache_gib or (2.0 if gpu and not options.tiny else 0.125)
    if options.row:
        cpu_row(options, options.row, Path(options.folder) / "model")
        return
    if options.out:
        Path(options.out).write_text(json.dumps(on_gpu(options)))
        return
    rows = in_processes(options) if gpu else on_cpu(options)
    kept = [{key: value for key, value in row.items() if key != "greedy_tokens"} for row in rows]
    facts = {name: getattr(options, name) for name in ("shape", "prompt", "tokens", "batch", "rounds")}
    if not options.no_record and not options.tiny:
        print(
            record(
                "serve_offload_gpu" if gpu else "serve_offload_cpu",
                kept,
                **facts,
                batch_tokens=options.batch_tokens,
                load_average=round(os.getloadavg()[1], 1),
            )
        )
    else:
        print(json.dumps(machine()))
    if not all(row.get("same_tokens", True) for row in rows):
        sys.exit("a row gave other tokens than memory")


if __name__ == "__main__":
    main()
