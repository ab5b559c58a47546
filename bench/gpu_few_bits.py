"""Experts in 4 and 8 bits beside bf16 on one GPU: one layer in a CUDA graph, rotated inputs, microseconds a call.

    python bench/gpu_few_bits.py --out bench/results/gpu_few_bits.json
    python bench/gpu_few_bits.py --tiles          over the tiles of the kernels for one token, best first

The floor is the time to read the weights of the experts that are chosen, scales included, at 4.6 TB/s.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.gpu_experts import READ_BANDWIDTH, SHAPES, graphed
from moesaic.kernels.triton import coded_products
from moesaic.kernels.triton.coded import Coded, half_of, packed
from moesaic.kernels.triton.layer import experts

SIZES = (1, 2, 4, 8, 16, 64, 256, 1024)


def coded(count: int, outputs: int, inputs: int, bits: int, group: int) -> Coded:
    """Random codes; making them from weights would take longer than the bench."""
    made = Coded.__new__(Coded)
    torch.nn.Module.__init__(made)
    made.dtype, made.group, made.inputs, made.bits = torch.bfloat16, group, inputs, bits
    made.apart = half_of(inputs, group)
    made.shape = torch.Size((count, outputs, inputs))
    codes = torch.randint(0, 2**bits, (count * outputs, inputs), dtype=torch.uint8, device="cuda")
    made.register_buffer("codes_EOB", packed(codes, bits, made.apart, 0).view(count, outputs, -1))
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


def weights_of(shape: tuple[int, ...], group: int) -> dict[str, tuple[Any, Any]]:
    D, F, E, _ = shape
    plain = [torch.randn(E, *size, device="cuda", dtype=torch.bfloat16) / 64 for size in ((2 * F, D), (D, F))]
    few = {f"{bits} bits": (coded(E, 2 * F, D, bits, group), coded(E, D, F, bits, group)) for bits in (4, 8)}
    return {"bf16": (plain[0], plain[1]), **few}


def layers(group: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name in ("Qwen3-30B", "GLM-4.5-Air"):
        shape = SHAPES[name]
        weights = weights_of(shape, group)
        table[name] = {}
        for T in SIZES:
            sets = inputs_of(shape, T)
            active = statistics.mean(routes.unique().numel() for _, routes, _ in sets)
            bytes_each = 3 * shape[0] * shape[1]
            row: dict[str, Any] = {}
            for label, pair in weights.items():
                us = graphed([lambda s=s, pair=pair: experts(*s, *pair) for s in sets])
                size = {"bf16": 2.0, "4 bits": 0.5 + 2 / group, "8 bits": 1 + 2 / group}[label]
                row[label] = {"us": us, "floor_us": active * bytes_each * size / READ_BANDWIDTH * 1e6}
            table[name][T] = row
            bf16 = row["bf16"]["us"]
            told = [
                f"{label} {cell['us']:7.1f} us ({cell['floor_us'] / cell['us']:3.0%}), {bf16 / cell['us']:.2f}x"
                for label, cell in row.items()
            ]
            print(f"{name:12} T={T:5}", *told, sep="   ", flush=True)
    return table


def tiles(group: int) -> None:
    for name in ("Qwen3-30B", "GLM-4.5-Air"):
        shape = SHAPES[name]
        gate_up, down = weights_of(shape, group)["4 bits"]
        sets = inputs_of(shape, 1)
        ups = [(8, 3, 1, 4), (8, 3, 2, 4), (8, 3, 4, 4), (8, 2, 4, 8), (8, 3, 2, 2), (16, 2, 4, 4), (8, 3, 1, 2)]
        downs = [(4, 3, 2, 2), (4, 2, 2, 4), (4, 3, 4, 2), (4, 2, 4, 4), (2, 2, 4, 4), (4, 3, 2, 1), (8, 2, 4, 2)]
        best = downs[0]
        wanted = coded_products.many(*sets[0], gate_up, down).float()
        for which in ("up", "down"):
            found = []
            for up, lower in itertools.product(ups, [best]) if which == "up" else itertools.product(ups[:1], downs):
                try:
                    run = [lambda s=s, u=up, d=lower: coded_products.few(*s, gate_up, down, u, d) for s in sets]
                    if not torch.allclose(run[0]().float(), wanted, rtol=0.02, atol=0.02 * wanted.abs().mean().item()):
                        print(name, up, lower, "is wrong")
                        continue
                    found.append((graphed(run, 10), up, lower))
                except Exception as error:  # a tile that does not fit
                    print(name, up, lower, type(error).__name__, str(error)[:100])
            found.sort()
            print(name, which, *(f"{us:.1f}:{up}{lower}" for us, up, lower in found), flush=True)
            if which == "up":
                ups = [found[0][1]]


def many_tiles(group: int) -> None:
    shape = SHAPES["Qwen3-30B"]
    gate_up, down = weights_of(shape, group)["4 bits"]
    for T in (1, 16, 64, 256, 1024):
        sets, found = inputs_of(shape, T), []
        for tile in ((16, 4, 1), (16, 4, 2), (32, 4, 2), (32, 4, 4), (64, 3, 4), (64, 4, 4), (64, 3, 8), (128, 3, 8)):
            coded_products.tile_for = lambda *_, tile=tile: tile
            routed = [lambda s=s: coded_products.many(*s, gate_up, down) for s in sets]
            found.append((graphed(routed, 10), tile))
        print("rows", T, *(f"{us:.1f}:{tile}" for us, tile in sorted(found)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.no_grad():
        if options.tiles:
            tiles(options.group)
            many_tiles(options.group)
            return
        table = layers(options.group)
    if options.out:
        facts = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        facts |= {"date": datetime.date.today().isoformat(), "group": options.group}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**facts, "layers": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
