"""The MoE layer on one GPU over shapes and batch sizes nobody tuned for, beside sort + F.grouped_mm + torch.compile.

    python bench/gpu_sweep.py                      every shape, every ratio, and the worst (about four minutes)
    python bench/gpu_sweep.py --seconds 120        what can be measured in that time; the rest is named
    python bench/gpu_sweep.py --shapes 1 4         some of them, by their place in the list

Shapes are those of published models where there is one, and some with widths that are no multiple of 128. Order is by
chance, so that a run that is cut short has seen some of everything. Operations are counted as 6 D F K T forward and
three times that forward+backward.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_experts import peer_gather, problem, steady, trainer
from bench.measure import record
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.tuning import choose

# Hidden size, expert hidden size, experts, experts per token, tokens.
SHAPES = (
    (1536, 512, 40, 8, 16384),
    (1536, 1088, 8, 1, 512),
    (1920, 960, 48, 4, 4096),
    (2048, 512, 256, 8, 16384),
    (2048, 1024, 64, 8, 2048),
    (2048, 1408, 64, 6, 8192),
    (2560, 1536, 64, 6, 4096),
    (2880, 2880, 32, 4, 16384),
    (2880, 2880, 32, 4, 512),
    (2880, 2880, 128, 4, 8192),
    (3584, 2560, 64, 8, 8192),
    (4096, 1536, 128, 8, 16384),
    (4096, 6400, 16, 2, 4096),
    (5120, 1536, 160, 6, 8192),
    (5120, 8192, 16, 1, 8192),
    (6144, 10752, 16, 4, 2048),
    (7168, 2048, 256, 8, 4096),
    (7168, 2048, 64, 8, 512),
)


def measured(shape: tuple[int, ...], load: float) -> dict[str, object]:
    D, F, E, K, T = shape
    inputs = problem((D, F, E, K), T)
    work = 6 * D * F * K * T
    row: dict[str, object] = {"shape": list(shape), "path": choose(inputs[0], inputs[1], inputs[3], True).path}
    found: dict[str, tuple[float, float]] = {}
    torch._dynamo.reset()
    for who, layer in (("ours", experts), ("peer", torch.compile(peer_gather, dynamic=False))):
        with torch.no_grad():
            forward = steady(lambda layer=layer: layer(*inputs), load, load)
        both = steady(trainer(layer, inputs), load, load)
        found[who] = (work / forward / 1e12, 3 * work / both / 1e12)
    for i, part in enumerate(("forward", "both")):
        row |= {f"{who}_{part}_tflops": round(numbers[i]) for who, numbers in found.items()}
        row[f"{part}_ratio"] = round(found["ours"][i] / found["peer"][i], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=400, help="begin no shape after this")
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers in the list, in this order; else all, by chance")
    parser.add_argument("--load", type=float, default=0.2, help="seconds of load before each timing, and of timing")
    parser.add_argument("--result", default="gpu_sweep", help="name of the result's file")
    options = parser.parse_args()
    begun = time.perf_counter()
    order = random.Random(0).sample(SHAPES, len(SHAPES))
    if options.shapes is not None:
        order = [SHAPES[number] for number in options.shapes]
    rows = []
    for shape in order:
        if time.perf_counter() - begun > options.seconds:
            break
        row = measured(shape, options.load)
        rows.append(row)
        print(
            f"D {shape[0]:5} F {shape[1]:5} E {shape[2]:3} k {shape[3]} T {shape[4]:5} {row['path']:8}"
            f" forward {row['ours_forward_tflops']:4} | {row['peer_forward_tflops']:4}  {row['forward_ratio']:.2f}x"
            f"   both {row['ours_both_tflops']:4} | {row['peer_both_tflops']:4}  {row['both_ratio']:.2f}x",
            flush=True,
        )
        torch.cuda.empty_cache()
    left = [list(shape) for shape in order[len(rows) :]]
    worst = {part: min(rows, key=lambda row: row[f"{part}_ratio"]) for part in ("forward", "both")}
    for part, row in worst.items():
        print(f"worst {part}: {row[f'{part}_ratio']:.2f}x at {row['shape']}")
    if left:
        print("not measured:", *left)
    ratios = {part: row[f"{part}_ratio"] for part, row in worst.items()}
    record(options.result, rows, worst=ratios, not_measured=left)


if __name__ == "__main__":
    main()
