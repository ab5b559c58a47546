"""Tiles of the experts' serving kernels on one GPU, best first: what `moesaic/kernels/triton/experts/tuning.py` holds.

    python bench/gpu_expert_tiles.py --tokens 1,16,64,256

Each kernel is timed alone, in a CUDA graph that holds eight routings, so that weights come from memory.
"""

import argparse
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_experts import SHAPES, graphed, problem
from moesaic.kernels.triton.experts import decode, rows, streamed
from moesaic.kernels.triton.experts.gate import PLAIN
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.experts.tuning import streamed as rule

# Columns, elements of K, stages, warps.
ONE_UP = (
    (32, 256, 3, 4), (32, 128, 4, 4), (32, 128, 6, 4), (32, 64, 8, 4),
    (64, 128, 3, 4), (64, 128, 3, 8), (16, 256, 4, 4),
)  # fmt: skip
ONE_DOWN = (
    (8, 256, 3, 4), (8, 128, 4, 4), (8, 128, 6, 4), (16, 128, 3, 4),
    (16, 128, 3, 8), (4, 256, 4, 4),
)  # fmt: skip
UP = (
    (32, 128, 3, 4), (32, 128, 4, 4), (32, 256, 2, 4), (32, 64, 5, 4),
    (64, 128, 3, 4), (64, 128, 2, 8), (64, 64, 4, 4),
)  # fmt: skip
DOWN = (
    (64, 128, 3, 4), (64, 128, 4, 4), (64, 256, 2, 4), (64, 64, 6, 4),
    (128, 128, 3, 4), (128, 128, 2, 8), (128, 64, 4, 4),
)  # fmt: skip


def tried(tiles, calls):
    """Microseconds of every tile that fits, best first."""
    found = []
    for tile in tiles:
        try:
            found.append((graphed([call(tile) for call in calls], 15), tile))
        except Exception as problem:  # too much shared memory: said, and left out
            print(f"  {tile}: {str(problem)[:80]}")
    return sorted(found)


def report(label, found):
    print(label, *(f"{us:.1f}:{','.join(map(str, tile))}" for us, tile in found), flush=True)


def one_token(name):
    _, _, E, K = SHAPES[name]
    x, _, weights, gate_up, down = problem(SHAPES[name], 1)
    routes = [torch.rand(1, E, device="cuda").topk(K, dim=-1).indices for _ in range(8)]

    def both(up, lower):
        return [lambda r=r: decode.decode(x, r, weights, gate_up, down, up, lower) for r in routes]

    ups = sorted((graphed(both(up, ONE_DOWN[0]), 15), up) for up in ONE_UP)
    report(f"{name} T=1 up", ups)
    report(f"{name} T=1 both", sorted((graphed(both(ups[0][1], lower), 15), lower) for lower in ONE_DOWN))


def some_tokens(name, T, aligns):
    D, F, E, K = SHAPES[name]
    x, _, weights, gate_up, down = problem(SHAPES[name], T)
    own = rule(T * K, E, torch.bfloat16)
    routes = [torch.rand(T, E, device="cuda").topk(K, dim=-1).indices for _ in range(8)]
    print(name, f"T={T} sort {graphed([lambda r=r: route(r, E, own.align) for r in routes], 15):.1f}", end=" ")
    for align in aligns or [own.align]:
        routings = [route(r, E, align) for r in routes]
        hidden = torch.randn(routings[0].rows, F, device="cuda", dtype=torch.bfloat16)
        out = torch.randn(routings[0].rows, D, device="cuda", dtype=torch.bfloat16)
        print(f"combine {graphed([lambda r=r: rows.combine(out, r, weights, T, K) for r in routings], 15):.1f}")
        ups = tried(UP, [lambda t, r=r: lambda: streamed.rows(x, gate_up, r, t, K, PLAIN) for r in routings])
        report(f"{name} T={T} align {align} up", ups)
        downs = tried(DOWN, [lambda t, r=r: lambda: streamed.rows(hidden, down, r, t) for r in routings])
        report(f"{name} T={T} align {align} down", downs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="Qwen3-30B,GLM-4.5-Air")
    parser.add_argument("--tokens", default="1,16,64,256,1024")
    parser.add_argument("--align", default="", help="rows of a tile to try; the rule's where this is empty")
    options = parser.parse_args()
    aligns = [int(align) for align in options.align.split(",") if align]
    for T in map(int, options.tokens.split(",")):
        for name in options.shapes.split(","):
            if T == 1:
                one_token(name)
            else:
                some_tokens(name, T, aligns)


if __name__ == "__main__":
    with torch.no_grad():
        main()
