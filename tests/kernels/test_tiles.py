"""The cost model finds good tiles in few timings, and what was found is used, whatever lies in the file.

pytest tests/kernels/test_tiles.py
"""

import itertools
import json
import math
import random
import statistics

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.triton.experts import tiles, tuning
from moesaic.kernels.triton.experts.cost_model import CostModel, search

SPACE = list(itertools.product((8, 16, 32, 64), (64, 128, 256, 512), (2, 3, 4, 5, 6), (2, 4, 8)))
SHAPE = (256, 128, 16, 2)
GPU = "NVIDIA H200"


def seconds(tile, seed=0):
    """A made-up processor: latency of short steps, few programs for wide tiles, too many stages that do not fit."""
    columns, depth, stages, warps = tile
    if columns * depth * stages * 2 > 160_000:
        return math.inf
    waves = math.ceil(768 / columns / 132 * (columns * depth * stages * 2) / 100_000 + 0.5)
    steps = 2048 / depth * (0.4 + 1.2 / stages)
    noise = random.Random(hash(tile) + seed).uniform(0.99, 1.01)
    return (3 + waves * steps * (0.3 + columns / 64) * (1 + abs(math.log2(warps / 4)) / 3)) * noise


def test_it_learns_the_order_of_times():
    random.seed(0)
    usable = [tile for tile in SPACE if math.isfinite(seconds(tile))]
    known = random.sample(usable, 60)
    guessed = CostModel({tile: seconds(tile) for tile in known}).predict(usable)
    ranks = [np.argsort(np.argsort(times)).tolist() for times in (guessed, [seconds(tile) for tile in usable])]
    assert statistics.correlation(*ranks) > 0.9


def test_it_finds_better_tiles_than_chance_in_as_many_timings():
    learned, drawn, best = [], [], min(map(seconds, SPACE))
    for seed in range(20):
        asked = []

        def measure(tile, seed=seed, asked=asked):
            asked.append(tile)
            return seconds(tile)

        tile, found = search(SPACE, (16, 256, 4, 4), measure, 28, seed)
        assert len(asked) == len(set(asked)) == 28 and asked[0] == (16, 256, 4, 4) and seconds(tile) == found
        learned.append(found / best)
        drawn.append(min(map(seconds, random.Random(seed).sample(SPACE, 28))) / best)
    assert statistics.mean(learned) < 1.03 < statistics.mean(drawn)


def test_small_spaces_and_tiles_that_cannot_run():
    assert search([(1, 1), (2, 2)], (1, 1), lambda tile: 1.0, 99) == ((1, 1), 1.0)
    assert search([(1, 1), (2, 2)], (1, 1), lambda tile: math.inf if tile == (2, 2) else 2.0, 99) == ((1, 1), 2.0)
    everything = search(SPACE, SPACE[0], lambda tile: math.inf, 20)
    assert everything == (SPACE[0], math.inf)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """No tables but those of the test, and a GPU by name."""

    def forget():
        tiles.table.cache_clear()
        tiles.tiles_of.cache_clear()

    monkeypatch.setattr(tiles, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(tiles, "own", lambda: tmp_path / "own" / "tiles.json")
    monkeypatch.setattr(tuning, "tiles_for", lambda _, path, shape, align=0: tiles.tiles_of(GPU, path, shape, align))
    forget()
    yield tmp_path
    forget()


def choice(tokens):
    D, F, E, K = SHAPE
    x, routes = torch.zeros(tokens, D, dtype=torch.bfloat16), torch.zeros(tokens, K, dtype=torch.int64)
    return tuning.choose(x, routes, torch.zeros(E, 2 * F, D, dtype=torch.bfloat16), False)


def test_what_was_found_is_used(folder):
    plain, sorted_ = choice(1), choice(64)
    assert (plain.path, sorted_.path) == ("decode", "streamed")
    tiles.keep(tiles.SHIPPED, GPU, "decode", SHAPE, 0, {"up_tile": (8, 128, 5, 2), "down_tile": (4, 64, 3, 4)})
    assert choice(1).up_tile == (8, 128, 5, 2) and choice(1).down_tile == (4, 64, 3, 4)
    assert choice(64) == sorted_
    tiles.keep(tiles.own(), GPU, "decode", SHAPE, 0, {"up_tile": (32, 64, 2, 8)})  # this machine's own goes before
    assert choice(1).up_tile == (32, 64, 2, 8) and choice(1).down_tile == plain.down_tile
    tiles.keep(tiles.own(), GPU, "streamed", SHAPE, sorted_.align, {"down_tile": (32, 256, 2, 8)})
    assert choice(64).down_tile == (32, 256, 2, 8) and choice(64).up_tile == sorted_.up_tile
    assert choice(1).up_tile == (32, 64, 2, 8)
    tiles.keep(tiles.own(), "another GPU", "decode", SHAPE, 0, {"up_tile": (16, 64, 2, 4)})
    assert choice(1).up_tile == (32, 64, 2, 8) and len(json.loads(tiles.own().read_text())) == 3


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7"]
    + [
        json.dumps({tiles.key(GPU, "decode", SHAPE, 0): entry})
        for entry in (7, {"up_tile": "x"}, {"up_tile": [1, 2, 3]}, {"up_tile": [0, 64, 2, 4]}, {"up_tile": [1.5] * 4})
    ],
)
def test_what_is_no_table_counts_for_nothing(folder, text):
    tiles.SHIPPED.write_text(text)
    assert choice(1) == tuning.Choice("decode")


def test_a_processor_has_no_tiles():
    assert tiles.tiles_for(torch.device("cpu"), "decode", SHAPE) == {}
