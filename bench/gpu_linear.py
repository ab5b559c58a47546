"""Few rows times a matrix on one GPU, at the widths of published models: how much of the memory's bandwidth is used.

    python -m bench.gpu_linear                     1, 2, 4 and 8 rows (half a minute)
    python -m bench.gpu_linear --rows 1

RMSNorm and matmul, as they follow each other in a decode step, in one CUDA graph; weights come from memory, not from
the cache. Floor: the matrix once, at 4.6 TB/s. Every row is compared, to the bit, with the same row in a batch of 64.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_experts import READ_BANDWIDTH
from bench.measure import record
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.norm import rms_norm

# Inputs, outputs.
SHAPES = (
    (4096, 14336),  # GLM-4.5-Air: queries, keys and values
    (12288, 4096),  # its output projection
    (4096, 2816),  # its shared expert
    (1408, 4096),
    (4096, 151552),  # its vocabulary
    (2048, 5120),  # Qwen3-30B
    (4096, 2048),
    (2048, 32000),
    (16384, 5120),
    (2880, 5120),  # gpt-oss
    (4096, 2880),
    (1536, 24576),  # DeepSeek-V3
    (16384, 7168),
    (18432, 7168),
    (7168, 36864),
    (7168, 1536),
    (7168, 576),
)
TOTAL = 1.5e9  # bytes of copies of a matrix, many times what the cache holds


def microseconds(run: Callable[[int], object], calls: int, times: int = 7) -> float:
    """Median, per call, of one CUDA graph of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            run(number)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(times):
        start.record(), graph.replay(), end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(found)


def measured(inputs: int, outputs: int, rows: list[int]) -> list[dict[str, object]]:
    torch.manual_seed(0)
    copies = max(2, min(24, int(TOTAL // (2 * inputs * outputs))))
    calls = max(copies, 24) // copies * copies
    weights = [
        torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, inputs**-0.5)
        for _ in range(copies)
    ]
    norm = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    x_TI = torch.randn(64, inputs, device="cuda", dtype=torch.bfloat16)
    batch_TO = linear(rms_norm(x_TI, norm, 1e-5), weights[0])
    floor = 2 * inputs * outputs / READ_BANDWIDTH * 1e6
    found = []
    for T in rows:
        few_TI = x_TI[:T]
        us = microseconds(lambda i, few_TI=few_TI: linear(rms_norm(few_TI, norm, 1e-5), weights[i % copies]), calls)
        same = torch.equal(linear(rms_norm(few_TI, norm, 1e-5), weights[0]), batch_TO[:T])
        row = {"inputs": inputs, "outputs": outputs, "rows": T, "us": round(us, 2), "floor_us": round(floor, 2)}
        found.append(row | {"of_bandwidth": round(floor / us, 3), "bits_of_batch": same})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--result", default="gpu_linear", help="name of the result's file")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for inputs, outputs in SHAPES:
        found = measured(inputs, outputs, options.rows)
        rows += found
        times = "  ".join(f"{row['rows']}: {row['us']:7.2f} us ({row['of_bandwidth']:.0%})" for row in found)
        print(f"{inputs:6} to {outputs:6}, floor {found[0]['floor_us']:6.2f}   {times}", flush=True)
        assert all(row["bits_of_batch"] for row in found), "a row has other bits alone"
        torch.cuda.empty_cache()
    record(options.result, rows)


if __name__ == "__main__":
    main()
