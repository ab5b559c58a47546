"""A rank that dies or stands still ends its group, soon and in words; nobody is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.group.ranks import RankLost, follow, join, open_engine, serving_layout
from tests.parallel.ranks import start
from tests.serve.group.groups import model_directory, new_request, some_requests
from tests.waiting import until

STALL = 2.0


def serve(rank: int, layout: str, directory: Path, folder: str, idle: bool) -> None:
    """Answers without end, or none; what happened to a rank is in its file."""
    torch.set_num_threads(1)
    note = Path(folder) / f"{rank}.txt"
    group = join(serving_layout(layout), rank, f"file:{folder}/store", stall_seconds=STALL)
    options: dict[str, Any] = {"page_size": 4, "cache_bytes": 2**20}
    try:
        if rank:
            follow(group, directory, {"threads": 1}, options)
            return
        engine = open_engine(group, directory, {"threads": 1}, options)
        driver: EngineDriver[int] = EngineDriver(engine)
        steps = 0
        while True:
            if not driver.open:
                for number, one in enumerate(some_requests(3)):
                    driver.add(new_request(engine, one), number)
            step = driver.step()
            assert step.error is None
            steps += 1
            (Path(folder) / "steps").write_text(str(steps))
            while idle and (Path(folder) / "idle").exists() and steps > 3:
                time.sleep(0.01)
    except RankLost as error:
        note.write_text(str(error))


@pytest.mark.parametrize(
    ("layout", "victim", "how", "idle"),
    [
        ("tp=2", 1, signal.SIGKILL, False),
        ("tp=2", 1, signal.SIGSTOP, False),
        ("tp=2", 0, signal.SIGKILL, False),
        ("tp=2", 0, signal.SIGKILL, True),
        ("tp=2", 1, signal.SIGKILL, True),
        ("ep=2", 1, signal.SIGSTOP, False),
    ],
)
def test_a_lost_rank_ends_its_group(layout: str, victim: int, how: int, idle: bool, tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path / "model")
    if idle:
        (tmp_path / "idle").touch()
    running = start(serve, (layout, directory, str(tmp_path), idle), 2, join=False)
    other = 1 - victim
    try:
        until(lambda: steps(tmp_path) > 3)
        os.kill(running.processes[victim].pid, how)
        if idle:  # the loss is noticed when something is to be done
            (tmp_path / "idle").unlink()
        until(lambda: not running.processes[other].is_alive())
        problem = (tmp_path / f"{other}.txt").read_text()
        assert str(victim) in problem and running.processes[other].exitcode == 0
        # A broken connection is seen at once, silence after `STALL`.
        assert ("Timed out waiting 2000ms" in problem) == (how == signal.SIGSTOP)
    finally:
        for process in running.processes:
            process.kill()
        for process in running.processes:
            process.join(30)
    assert not any(process.is_alive() for process in running.processes)


def steps(folder: Path) -> int:
    try:
        return int((folder / "steps").read_text() or 0)
    except FileNotFoundError:
        return 0
