"""Whole runs under every layout beside one process: the same losses, gradients and weights, and the same bits for data
and expert parallel ranks that add up in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import SHAPES, as_rank, assert_close, assert_same, prepared, run

STEPS = ("train.steps=6", "train.save_every=6")
EXACT = "parallel.exact=true"

# Layouts of two and of four ranks, for all shapes; each in words of the command line.
LAYOUTS = {
    2: ["dp=2 zero=0", "dp=2 zero=3", "ep=2", "tp=2", "cp=2", "cp=2 context=mesh", "pp=2"],
    4: [
        "dp=4 ep=2 replicas=2",
        "ep=4 dispatch=once",
        "dp=2 tp=2",
        "dp=2 cp=2 ep=2",
        "tp=2 cp=2 tiles=2 regather=true",
        "pp=2 tp=2",
        "pp=2 cp=2 schedule=zero_bubble",
        "pp=2 dp=2 ep=2",
    ],
}


def keys(layout: str) -> list[str]:
    return [f"parallel.{word}" for word in layout.split()]


def all_layouts(rank: int, world: int, data: Path, folder: Path, shape: str) -> None:
    as_rank(rank, world)
    for layout in LAYOUTS[world]:
        accumulate = 4 if "pp" in layout else 1
        accumulate //= 2 if "dp=2" in layout and accumulate > 1 else 1
        out = folder / f"{shape}-{layout.replace(' ', '-')}"
        run(shape, data, out, *STEPS, *keys(layout), f"train.accumulate={accumulate}", "balance.sequence_loss=0.01")


def exact_layouts(rank: int, world: int, data: Path, folder: Path) -> None:
    as_rank(rank, world)
    for layout in (f"dp={world} zero=0", f"dp={world} zero=3", f"ep={world} chunks=2"):
        out = folder / f"exact-{world}-{layout.replace(' ', '-')}"
        run("glm", data, out, *STEPS, *keys(layout), EXACT, "balance.sequence_loss=0.01")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("layouts") / "data")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_train_as_one_process_does(tmp_path: Path, data: Path, shape: str, world: int) -> None:
    run(shape, data, tmp_path / "one", *STEPS, "train.accumulate=4", "balance.sequence_loss=0.01")
    on_ranks(world, all_layouts, tmp_path, data, tmp_path, shape)
    for layout in LAYOUTS[world]:
        assert_close(tmp_path / f"{shape}-{layout.replace(' ', '-')}", tmp_path / "one", layout)


@pytest.mark.parametrize("world", [2, 4])
def test_data_and_expert_ranks_have_the_bits_of_one_process(tmp_path: Path, data: Path, world: int) -> None:
    run("glm", data, tmp_path / "one", *STEPS, f"train.accumulate={world}", "balance.sequence_loss=0.01")
    on_ranks(world, exact_layouts, tmp_path, data, tmp_path)
    found = sorted(tmp_path.glob("exact-*"))
    assert len(found) == 3
    for out in found:
        assert_same(out, tmp_path / "one")
