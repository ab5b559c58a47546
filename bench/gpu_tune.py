"""Find the quickest tiles of the serving kernels for a shape of experts, and keep them where the kernels look.

    python bench/gpu_tune.py                                GLM's and Qwen's shapes, into kernels/triton/tiles.json
    python bench/gpu_tune.py --shape 2048,768,128,8 --own   one (D, F, experts, per token), for this machine alone

A learned cost model (`kernels/triton/experts/cost_model.py`) says which tiles to time next. A tile counts only if its
bits are those of the tile that would be used without it, and if it is quicker by more than timings differ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import sys
from dataclasses import replace
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_experts import SHAPES, graphed
from bench.gpu_quantized import inputs_of
from bench.measure import record
from moesaic.kernels.triton.experts import tiles
from moesaic.kernels.triton.experts.cost_model import Tile, search
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.tuning import Choice, choose

SPACES: dict[tuple[str, str], list[Tile]] = {
    ("decode", "up_tile"): list(itertools.product((8, 16, 32), (64, 128, 256, 512), (2, 3, 4, 5, 6), (2, 4, 8))),
    ("decode", "down_tile"): list(itertools.product((4, 8, 16), (64, 128, 256), (2, 3, 4, 5, 6), (2, 4, 8))),
    ("streamed", "up_tile"): list(itertools.product((16, 32, 64), (64, 128, 256), (2, 3, 4, 5, 6), (4, 8))),
    ("streamed", "down_tile"): list(itertools.product((32, 64, 128), (64, 128, 256), (2, 3, 4, 5, 6), (4, 8))),
}
NOISE = 0.01  # by which timings of the same thing differ


def tuned(shape: tuple[int, ...], tokens: int, weights: tuple[torch.Tensor, ...], budget: int) -> dict[str, Any] | None:
    """What was found for so many tokens: the choice, and microseconds before and after. None where no tile counts."""
    sets = inputs_of(shape, tokens)
    choice: Choice = choose(sets[0][0], sets[0][1], weights[0], False)
    if choice.path not in ("decode", "streamed"):
        return None
    wanted = [experts(*one, *weights, choice=choice) for one in sets]
    timed = 0

    def microseconds(tried: Choice) -> float:
        nonlocal timed
        try:
            if not all(torch.equal(experts(*one, *weights, choice=tried), out) for one, out in zip(sets, wanted)):
                print("other bits:", tried, flush=True)
                return math.inf
            took = float(graphed([lambda one=one: experts(*one, *weights, choice=tried) for one in sets], 10))
            timed += 1
            return took
        except Exception:  # too large for the processor, or not to be compiled
            return math.inf

    first = best = microseconds(choice)
    for kind in tiles.KINDS:
        begin = getattr(choice, kind)
        tile, us = search(
            SPACES[choice.path, kind], begin, lambda tile: microseconds(replace(choice, **{kind: tile})), budget
        )
        if us < best * (1 - NOISE):
            choice, best = replace(choice, **{kind: tile}), us
    row = {"path": choice.path, "tokens": tokens, "align": choice.align if choice.path == "streamed" else 0}
    return (
        row | {kind: getattr(choice, kind) for kind in tiles.KINDS} | {"before_us": first, "us": best, "timed": timed}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", help="D,F,experts,per token; else GLM's and Qwen's")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--budget", type=int, default=32, help="tiles timed for each launch")
    parser.add_argument("--own", action="store_true", help="for this machine alone, not for all that have this version")
    options = parser.parse_args()
    file = tiles.own() if options.own else tiles.SHIPPED
    shapes = [tuple(map(int, options.shape.split(",")))] if options.shape else [*SHAPES.values()][:2]
    rows = []
    for shape in shapes:
        D, F, E, _ = shape
        weights = tuple(
            torch.randn(E, *size, device="cuda", dtype=torch.bfloat16) / 64 for size in ((2 * F, D), (D, F))
        )
        for tokens in options.tokens:
            with torch.no_grad():
                row = tuned(shape, tokens, weights, options.budget)
            if row is None:
                continue
            found = {kind: row[kind] for kind in tiles.KINDS}
            tiles.keep(file, torch.cuda.get_device_name(), row["path"], shape, row["align"], found)
            rows.append({"shape": shape, **row})
            print(rows[-1], flush=True)
    record("gpu_tune", rows, budget=options.budget)


if __name__ == "__main__":
    main()
