"""Asynchronous RL on several ranks, with a real worker on Ray: the bits of one trainer with the same worker, and no
rank ever holds the weights of all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.align import align
from moesaic.align.rollouts import weight_sync
from moesaic.align.rollouts.async_stream import AsyncRolloutStream
from moesaic.align.rollouts.worker_pool import WorkerPool
from moesaic.train.report.metrics import read_metrics
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import as_rank, assert_same, losses
from tests.parallel.test_align_ranks import tune, tune_alone
from tests.parallel.test_policy_ranks import until_step_three

pytest.importorskip("ray")
STAGE = "{name: policy, steps: 4, lr: 0.003, data: [{path: 'builtin:sums'}], prompts: 3, group: 4, max_tokens: 8,"
STAGE += " rewards: [{name: length, unit: characters, max_length: 3, slack: 20}], evaluate_every: 0, save_every: 2,"
STAGE += " updates: 2, asynchronous: {staleness: 1, on_update: finish, threads: 1}}"
BLOCK_BYTES = 4096


def on_two(rank: int, world: int, folder: Path) -> None:
    as_rank(rank, world)
    blocks: list[int] = []
    publish = WorkerPool.publish

    def noted(pool: WorkerPool, version: int, given: Iterable[np.ndarray]) -> None:
        def each() -> Iterable[np.ndarray]:
            for block in given:
                blocks.append(block.nbytes)
                yield block

        publish(pool, version, each())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "BLOCK_BYTES", BLOCK_BYTES)
        patch.setattr(WorkerPool, "publish", noted)
        tune(folder / "model", folder / "dp", "parallel.exact=true", "parallel.zero=3", stage=STAGE)
    whole = (folder / "model" / "model.safetensors").stat().st_size
    if rank == 0:  # it has the worker
        assert sum(blocks) > whole and max(blocks) < whole / 2
    else:
        assert not blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align, "train", until_step_three)
        tune(folder / "model", folder / "ep", "parallel.exact=true", "parallel.ep=2", stage=STAGE)
    assert len(losses(folder / "ep")) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncRolloutStream, "sync_weights", killing(AsyncRolloutStream.sync_weights))
        tune(folder / "model", folder / "ep", "parallel.exact=true", "parallel.zero=1", stage=STAGE)


def killing(sync: Any) -> Any:
    """The worker is killed when it has its second weights."""

    def sync_weights(stream: AsyncRolloutStream) -> None:
        sync(stream)
        for handle in stream.workers.handles:
            if handle.process:
                os.kill(handle.process, signal.SIGKILL)
                handle.process = 0

    return sync_weights


def test_asynchronous_policy_on_two_ranks(tmp_path: Path) -> None:
    tune_alone(tmp_path, {"one": STAGE})
    on_ranks(2, on_two, tmp_path, tmp_path)
    for name in ("dp", "ep"):  # the second was cut off, gone on with under another layout, and lost its worker
        assert_same(tmp_path / name, tmp_path / "one")
    one, two = ([line.get("staleness_max") for line in read_metrics(tmp_path / name)] for name in ("one", "dp"))
    assert one == two and 1 in one  # the second set of rollouts is of the first weights
    assert any(losses(tmp_path / "one")), "nothing was learned"
