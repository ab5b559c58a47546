"""Float8 matmuls of many rows on one Hopper GPU: tiles beside the bf16 kernel, microseconds in a CUDA graph.

    python bench/gpu_float8.py
    python bench/gpu_float8.py --check       the same bits as the kernel of few rows, for every tile, and no timing

Then whole layers and linear maps by both kernels, to see from how many rows on the persistent one is faster.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.gpu_experts import graphed
from moesaic.kernels.triton.experts.hopper import grouped as bf16
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.sort import Routing, route
from moesaic.kernels.triton.float8 import weight as weight_module
from moesaic.kernels.triton.float8.hopper import matmul as many
from moesaic.kernels.triton.float8.hopper.matmul import Tile
from moesaic.kernels.triton.float8.matmul import matmul as few
from moesaic.kernels.triton.float8.matmul import round_rows
from moesaic.kernels.triton.float8.rounding import Rounded, round_sorted
from moesaic.kernels.triton.float8.weight import Float8Weight

SHAPES = {"Qwen3-30B": (2048, 768, 128, 8), "GLM-4.5-Air": (4096, 1408, 128, 8)}
TILES = [
    Tile(128, 256, 4, 16),
    Tile(128, 256, 3, 16),
    Tile(256, 128, 4, 8),
    Tile(128, 128, 6, 16),
]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def routed(T: int, E: int, K: int, align: int) -> Routing:
    return route(torch.rand(T, E, device="cuda").topk(K, -1).indices.int(), E, align)


def align_of(tile: Tile) -> int:
    return tile.rows // 2


def tried(name: str, run: Callable[[], str]) -> None:
    """What fails is said, and the rest goes on."""
    try:
        print(f"{name:60}", run(), flush=True)
    except Exception:
        print(f"{name:60}", "FAILED", flush=True)
        traceback.print_exc()


def compare(found: torch.Tensor, wanted: torch.Tensor) -> str:
    same = torch.equal(found, wanted)
    off = (found.float() - wanted.float()).abs().max().item()
    return f"same bits: {same}, largest difference {off:.3g} of {wanted.float().abs().max().item():.3g}"


def check() -> None:
    torch.manual_seed(0)
    for T, outputs, inputs, tile in [
        (3000, 5120, 2048, TILES[0]), (3000, 5120, 2048, TILES[2]), (3000, 5120, 2048, TILES[3]),
        (257, 1408, 4096, TILES[0]), (300, 304, 720, TILES[0]),
    ]:  # fmt: skip
        weight, x_TI, bias = (
            Float8Weight.rounded(random(outputs, inputs, scale=0.02)),
            random(T, inputs),
            random(outputs),
        )
        numbers = weight.numbers

        def plain(numbers=numbers, x_TI=x_TI, bias=bias, tile=tile) -> str:
            x8, scales = round_rows(x_TI)
            x8_again, scales_GP = round_sorted(x_TI)
            assert torch.equal(x8.view(torch.uint8), x8_again.view(torch.uint8))
            assert torch.equal(scales, scales_GP.T[: len(x_TI)])
            wanted = few(x8, scales, *numbers, torch.bfloat16, bias)
            return compare(many.matmul(Rounded(x8_again, scales_GP), numbers, bias, None, tile), wanted)

        tried(f"linear {T} x {inputs} -> {outputs}, {tile}", plain)
    for name, (D, F, E, K) in {
        "small": (512, 384, 16, 4),
        "Qwen": (2048, 768, 32, 8),
        "GLM": (4096, 1408, 32, 8),
    }.items():
        up, down = (
            Float8Weight.rounded(random(E, 2 * F, D, scale=0.03)),
            Float8Weight.rounded(random(E, D, F, scale=0.03)),
        )
        x_TD = random(1000, D)
        for tile in TILES:
            routing = routed(1000, E, K, align_of(tile))

            def grouped(routing=routing, up=up, down=down, x_TD=x_TD, tile=tile, K=K) -> str:
                given = round_sorted(x_TD, routing, K)
                x8, scales_GP = given
                real = torch.zeros(routing.rows, dtype=torch.bool, device="cuda")
                real[routing.slots_N.long()] = True
                first, second = up.numbers, down.numbers
                scales_PG = scales_GP.T[: routing.rows].contiguous()
                wanted = few(x8, scales_PG, *first, torch.bfloat16, routing=routing)
                told = compare(many.matmul(given, first, None, routing, tile)[real], wanted[real])
                if (tile.rows, tile.columns) == (128, 256):
                    saved, (hidden, hidden_GP) = many.gate_up(given, first, routing, True, tile)
                    h8, h_scales = round_rows(wanted, gated=True)
                    told += f"\n    saved: {compare(saved[real], wanted[real])}"
                    told += f"\n    hidden: {compare(hidden.float()[real], h8.float()[real])}"
                    told += f"\n    their scales: {compare(hidden_GP.T[: routing.rows][real], h_scales[real])}"
                    _, (again, again_GP) = many.gate_up(given, first, routing, False, tile)
                    told += f"\n    not saved: {compare(again.float()[real], h8.float()[real])}"
                    out = few(h8, h_scales, *second, torch.bfloat16, routing=routing)
                    found = many.matmul(Rounded(again, again_GP), second, None, routing, tile)
                    told += f"\n    down: {compare(found[real], out[real])}"
                return told

            tried(f"{name}, {tile}", grouped)


def time() -> None:
    torch.manual_seed(0)
    for name, (D, F, E, K) in SHAPES.items():
        plain = [random(E, 2 * F, D, scale=0.02), random(E, D, F, scale=0.02)]
        up, down = map(Float8Weight.rounded, plain)
        first, second = up.numbers, down.numbers
        for T in (16384, 4096, 1024) if name == "Qwen3-30B" else (16384, 4096):
            flops = 2 * T * K * D * F
            x_TD = random(T, D)
            wide = routed(T, E, K, 128)
            x_PD, x_PF = random(wide.rows, D), random(wide.rows, F)

            def told(us: float, flops: float) -> str:
                return f"{us:8.1f} us {flops / us / 1e6:7.0f} TFLOP/s"

            def bf16_up(x_PD=x_PD, plain=plain, wide=wide, flops=flops) -> str:
                return told(graphed([lambda: bf16.gate_up(x_PD, plain[0], wide, False)]), 2 * flops)

            def bf16_down(x_PF=x_PF, plain=plain, wide=wide, flops=flops) -> str:
                return told(graphed([lambda: bf16.rows(x_PF, plain[1], wide, False)]), flops)

            tried(f"{name} T={T} bf16 gate_up", bf16_up)
            tried(f"{name} T={T} bf16 down", bf16_down)
            for tile in TILES:
                routing = routed(T, E, K, align_of(tile))
                given = round_sorted(x_TD, routing, K)
                hidden = round_sorted(random(routing.rows, F))

                def tile_up(given=given, first=first, routing=routing, tile=tile, flops=flops) -> str:
                    if (tile.rows, tile.columns) == (128, 256):
                        us = graphed([lambda: many.gate_up(given, first, routing, False, tile)])
                        saved = graphed([lambda: many.gate_up(given, first, routing, True, tile)])
                        bare = graphed([lambda: many.matmul(given, first, None, routing, tile)])
                        return f"{told(us, 2 * flops)}; saved {told(saved, 2 * flops)}; plain {told(bare, 2 * flops)}"
                    return told(graphed([lambda: many.matmul(given, first, None, routing, tile)]), 2 * flops)

                def tile_down(hidden=hidden, second=second, routing=routing, tile=tile, flops=flops) -> str:
                    return told(graphed([lambda: many.matmul(hidden, second, None, routing, tile)]), flops)

                tried(f"{name} T={T} gate_up {tile}", tile_up)
                tried(f"{name} T={T} down {tile}", tile_down)
            routing = routed(T, E, K, 64)

            def rounding(x_TD=x_TD, routing=routing, K=K) -> str:
                return f"{graphed([lambda: round_sorted(x_TD, routing, K)]):8.1f} us"

            tried(f"{name} T={T} rounded and sorted", rounding)


def crossing() -> None:
    """From how many rows on the persistent kernel is faster than that of few rows, whole layers and linear maps."""
    torch.manual_seed(0)
    for name, (D, F, E, K) in SHAPES.items():
        plain = [random(E, 2 * F, D, scale=0.02), random(E, D, F, scale=0.02)]
        float8 = [Float8Weight.rounded(weight) for weight in plain]
        for T in (256, 512, 768, 1024, 2048, 4096, 16384):
            x_TD = random(T, D)
            routes = torch.rand(T, E, device="cuda").topk(K, -1).indices, torch.rand(T, K, device="cuda")

            def layer(x_TD=x_TD, routes=routes, plain=plain, float8=float8) -> str:
                base = graphed([lambda: experts(x_TD, *routes, *plain)])
                told = [f"bf16 {base:8.1f} us"]
                for path, least in (("few", 1 << 40), ("many", 0)):
                    weight_module.MANY_EACH = least
                    us = graphed([lambda: experts(x_TD, *routes, *float8)])
                    told.append(f"{path} {us:8.1f} us {base / us:.2f}x")
                return "  ".join(told)

            tried(f"{name} layer, {T} tokens", layer)
    for outputs, inputs in ((5120, 2048), (2048, 4096)):
        weight = random(outputs, inputs, scale=0.02)
        made = Float8Weight.rounded(weight)
        for T in (64, 128, 256, 512, 1024, 4096, 16384):
            x_TI = random(T, inputs)

            def linear(x_TI=x_TI, weight=weight, made=made) -> str:
                base = graphed([lambda: torch.nn.functional.linear(x_TI, weight)])
                told = [f"library's bf16 {base:8.1f} us"]
                for path, least in (("few", 1 << 40), ("many", 0)):
                    weight_module.MANY = least
                    us = graphed([lambda: made.linear(x_TI)])
                    told.append(f"{path} {us:8.1f} us {base / us:.2f}x")
                return "  ".join(told)

            tried(f"{inputs} -> {outputs}, {T} rows", linear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--crossing", action="store_true", help="whole layers and linear maps alone")
    options = parser.parse_args()
    with torch.no_grad():
        if options.check:
            check()
        else:
            crossing()
            if not options.crossing:
                time()


if __name__ == "__main__":
    main()
