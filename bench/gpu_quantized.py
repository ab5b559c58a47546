"""Experts in 4 and 8 bits and in float8 (W8A8) beside bf16 on one GPU: one layer in a CUDA graph, microseconds a call.

    python bench/gpu_quantized.py --out bench/results/gpu_quantized.json
    python bench/gpu_quantized.py --forms float8 --sizes 1024 4096 16384        one of them, at these numbers of tokens

The floor is the time to read the weights of the experts that are chosen, scales included, at 4.6 TB/s.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.gpu_experts import READ_BANDWIDTH, SHAPES, graphed
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.float8.weight import Float8Weight
from moesaic.kernels.triton.quantized.packed_weight import half_of, packed
from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight

FORMS = ("4 bits", "8 bits", "float8")
SIZES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384)


def coded(count: int, outputs: int, inputs: int, bits: int, group: int) -> GpuQuantizedWeight:
    """Random codes; making them from weights would take longer than the bench."""
    made = GpuQuantizedWeight.__new__(GpuQuantizedWeight)
    torch.nn.Module.__init__(made)
    made.dtype, made.group, made.inputs, made.bits = torch.bfloat16, group, inputs, bits
    made.half_width = half_of(inputs, group)
    made.shape = torch.Size((count, outputs, inputs))
    codes = torch.randint(0, 2**bits, (count * outputs, inputs), dtype=torch.uint8, device="cuda")
    made.register_buffer("codes_EOB", packed(codes, bits, made.half_width, 0).view(count, outputs, -1))
    scales = torch.rand(count, inputs // group, outputs, device="cuda") / inputs**0.5 / 2 ** (bits - 1)
    made.register_buffer("scales_EGO", scales.half())
    made.register_buffer("zeros_EGO", None)
    return made


def inputs_of(shape: tuple[int, ...], T: int) -> list[tuple[torch.Tensor, ...]]:
    D, _, E, K = shape
    torch.manual_seed(T)
    return [
        (
            torch.randn(T, D, device="cuda", dtype=torch.bfloat16),
            torch.rand(T, E, device="cuda").topk(K, dim=-1).indices,
            torch.softmax(torch.randn(T, K, device="cuda"), -1),
        )
        for _ in range(8)
    ]


def weights_of(shape: tuple[int, ...], group: int, forms: list[str]) -> dict[str, tuple[Any, Any]]:
    D, F, E, _ = shape
    made = {
        "bf16": tuple(torch.randn(E, *size, device="cuda", dtype=torch.bfloat16) / 64 for size in ((2 * F, D), (D, F)))
    }
    for form in forms:
        if form == "float8":
            made[form] = tuple(map(Float8Weight.rounded, made["bf16"]))
        else:
            bits = int(form.removesuffix(" bits"))
            made[form] = coded(E, 2 * F, D, bits, group), coded(E, D, F, bits, group)
    return made


def layers(group: int, forms: list[str], sizes: list[int]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name in ("Qwen3-30B", "GLM-4.5-Air"):
        shape = SHAPES[name]
        weights = weights_of(shape, group, forms)
        table[name] = {}
        for T in sizes:
            sets = inputs_of(shape, T)
            active = statistics.mean(routes.unique().numel() for _, routes, _ in sets)
            bytes_each = 3 * shape[0] * shape[1]
            row: dict[str, Any] = {}
            for label, pair in weights.items():
                us = graphed([lambda s=s, pair=pair: experts(*s, *pair) for s in sets])
                size = {"bf16": 2.0, "4 bits": 0.5 + 2 / group, "8 bits": 1 + 2 / group, "float8": 1.0}[label]
                row[label] = {"us": us, "floor_us": active * bytes_each * size / READ_BANDWIDTH * 1e6}
            table[name][T] = row
            bf16 = row["bf16"]["us"]
            told = [
                f"{label} {cell['us']:7.1f} us ({cell['floor_us'] / cell['us']:3.0%}), {bf16 / cell['us']:.2f}x"
                for label, cell in row.items()
            ]
            print(f"{name:12} T={T:5}", *told, sep="   ", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS, help="beside bf16")
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.no_grad():
        table = layers(options.group, options.forms, options.sizes)
    if options.out:
        facts = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        facts |= {"date": datetime.date.today().isoformat(), "group": options.group}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**facts, "layers": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
