"""A checkpoint knows no layout: whoever wrote it, any other layout resumes it to the same next losses; and a rank that
dies while it is written leaves the last one as it was."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import moesaic
from moesaic.train.sharded_checkpoints import ShardedCheckpoints
from tests.parallel.ranks import on_ranks, start
from tests.parallel.small_runs import as_rank, losses, prepared, run, weights

FIRST, ALL = ("train.steps=3", "train.save_every=3"), ("train.steps=6", "train.save_every=3")
# Layouts of four ranks, all of which both write and resume; one process does too.
LAYOUTS = ["dp=4 zero=3", "dp=4 zero=0", "ep=4", "dp=4 ep=2", "dp=2 tp=2 ep=2", "cp=2 tp=2", "pp=2 dp=2", "pp=2 cp=2"]
ACCUMULATE = "train.accumulate=2"
COMMON = ("schedule={name: constant}", ACCUMULATE)


def keys(layout: str) -> list[str]:
    return [f"parallel.{word}" for word in layout.split()]


def write_all(rank: int, world: int, data: Path, folder: Path) -> None:
    as_rank(rank, world)
    for number, layout in enumerate(LAYOUTS):
        run("glm", data, folder / f"from-{number}", *FIRST, *COMMON, *keys(layout))


def resume_all(rank: int, world: int, data: Path, folder: Path) -> None:
    """Each layout resumes what the one before it in the list wrote, the first what one process wrote."""
    as_rank(rank, world)
    for number, layout in enumerate(LAYOUTS):
        run("glm", data, folder / f"to-{number}", *ALL, *COMMON, *keys(layout))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("matrix") / "data")


def test_any_layout_resumes_any_other(tmp_path: Path, data: Path) -> None:
    run("glm", data, tmp_path / "one", *ALL, *COMMON)
    run("glm", data, tmp_path / "first", *FIRST, *COMMON)
    on_ranks(4, write_all, tmp_path, data, tmp_path)
    for number in range(len(LAYOUTS)):
        source = tmp_path / ("first" if number == 0 else f"from-{number - 1}")
        shutil.copytree(source, tmp_path / f"to-{number}", symlinks=True)
    (tmp_path / "store").unlink()
    on_ranks(4, resume_all, tmp_path, data, tmp_path)
    expected = losses(tmp_path / "one")
    for number, layout in enumerate(LAYOUTS):
        found = losses(tmp_path / f"to-{number}")
        assert found == pytest.approx(expected, rel=1e-5), layout
    # One process goes on from each, too: a pipeline's, a tensor-parallel rank's, an expert's.
    for number, layout in enumerate(LAYOUTS):
        run("glm", data, tmp_path / f"from-{number}", *ALL, *COMMON)
        assert losses(tmp_path / f"from-{number}") == pytest.approx(expected, rel=1e-5), layout
    assert moesaic.load(tmp_path / "to-4").config == moesaic.load(tmp_path / "one").config


def killed_while_saving(rank: int, world: int, store: str, data: Path, out: Path, moment: str) -> None:
    """The last rank dies in the second save: before it has written anything, or when it has and would say so."""
    as_rank(rank, world)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    fill = ShardedCheckpoints._fill

    def dying(self: Any, fresh: Path, snapshot: Any) -> None:
        if snapshot.step == 6 and rank == world - 1:
            if moment == "written":
                self.world.mesh.collect = lambda *said: os.kill(os.getpid(), signal.SIGKILL)
                fill(self, fresh, snapshot)
            os.kill(os.getpid(), signal.SIGKILL)
        fill(self, fresh, snapshot)

    ShardedCheckpoints._fill = dying  # type: ignore[method-assign]
    run("glm", data, out, *ALL, *COMMON, "parallel.ep=2")


@pytest.mark.parametrize("moment", ["unwritten", "written"])
def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(tmp_path: Path, data: Path, moment: str) -> None:
    out = tmp_path / "out"
    context = start(killed_while_saving, (2, str(tmp_path / "store"), data, out, moment), 2, join=False)
    with pytest.raises(Exception, match="SIGKILL"):
        while not context.join():
            pass
    assert [path.name for path in sorted((out / "checkpoints").glob("step-*"))] == ["step-00000003"]
    assert weights(out).keys() == weights(out / "checkpoints/step-00000003").keys()
    moesaic.load(out)
    run("glm", data, out, *ALL, *COMMON)  # one process goes on
    run("glm", data, tmp_path / "one", *ALL, *COMMON)
    assert losses(out) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
