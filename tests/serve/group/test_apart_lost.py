"""An expert rank that dies in the middle of requests: they wait and go on with the tokens and bits of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import start
from tests.serve.group.apart_ranks import run_rank
from tests.serve.group.groups import Case, alone, answers, meeting_place, model_directory, some_requests
from tests.waiting import PATIENCE, until

OPTIONS = {"page_size": 4, "cache_bytes": 2**21}


def dies_at(number: int, layer: int, when: int) -> Any:
    """What makes one expert rank kill itself at its so-many-th question of a layer."""

    def prepare(expert: int, serving: Any) -> None:
        asked = 0

        def watch(kind: str, at: int, micro: int, done: bool) -> None:
            nonlocal asked
            asked += at == layer and not done
            if asked == when:
                os.kill(os.getpid(), signal.SIGKILL)

        if expert == number:
            serving.watch = watch

    return prepare


class DiesAt:
    """Travels to the processes of a test."""

    def __init__(self, number: int, layer: int, when: int) -> None:
        self.arguments = (number, layer, when)

    def __call__(self, expert: int, serving: Any) -> None:
        dies_at(*self.arguments)(expert, serving)


def answered(engine: Any, asked: list[Any]) -> dict[str, Any]:
    found = answers(engine, asked)
    stats = engine.away.stats()
    return {
        "answers": found,
        "lost": engine.away.lost,
        "held": {str(rank): one.held for rank, one in stats.items()},
        "read": sum(one.read for one in stats.values()),
    }


class AnsweredTwice:
    """Without the rank that died, and with the one in its place, which starts when the first answers are there."""

    def __init__(self, first: Path) -> None:
        self.first = first

    def __call__(self, engine: Any, asked: list[Any]) -> dict[str, Any]:
        found = answered(engine, asked)
        self.first.touch()
        until(lambda: engine.life_of(1) > 1, "another rank in its place")
        again = answered(engine, asked)
        return {
            "found": found,
            "again": again,
            "assignments": {str(n): s.assignments for n, s in engine.away.stats().items()},
        }


def test_another_rank_takes_the_place_of_one_that_died(tmp_path: Path) -> None:
    """It reads its experts, is let in before a step, and the others give up what they had taken."""
    asked = some_requests(6, tokens=8)
    directory = model_directory("qwen3_moe", tmp_path / "model")
    expected = alone(directory, asked, **OPTIONS)
    first = tmp_path / "first"
    case = Case("tp=2 experts=2", directory, AnsweredTwice(first), asked, **OPTIONS)
    addresses = [meeting_place(tmp_path)]
    ranks = start(run_rank, ([case], addresses, str(tmp_path), DiesAt(1, layer=1, when=5)), 4, join=False)
    until(lambda: ranks.processes[3].exitcode is not None, "its death")
    assert ranks.processes[3].exitcode == -signal.SIGKILL
    until(first.exists, "the answers of those that are left")
    new = start(in_its_place, ([case], addresses, str(tmp_path)), 1, join=False)
    processes = [*ranks.processes[:3], *new.processes]
    until(lambda: all(process.exitcode is not None for process in processes), "their end")
    assert [process.exitcode for process in processes] == [0] * 4
    result = json.loads((tmp_path / "0.json").read_text())
    for found in (result["found"], result["again"]):
        assert found["answers"] == expected
    assert result["found"]["lost"] == [1] and result["again"]["lost"] == []
    assert result["again"]["held"] == {"0": 12, "1": 12}
    assert result["assignments"]["1"] > 0


def in_its_place(number: int, cases: list[Case], addresses: list[str], folder: str) -> None:
    run_rank(3, cases, addresses, folder)


@pytest.mark.parametrize("layout, copies", [("tp=2 experts=2", 0), ("tp=1 experts=3", 3)])
def test_a_killed_expert_rank_loses_no_request(tmp_path: Path, layout: str, copies: int) -> None:
    asked = some_requests(8, tokens=10)
    directory = model_directory("qwen3_moe", tmp_path / "model")
    expected = alone(directory, asked, **OPTIONS)
    case = Case(layout, directory, answered, asked, expert_replicas=copies, **OPTIONS)
    addresses = [meeting_place(tmp_path)]
    ranks = start(run_rank, ([case], addresses, str(tmp_path), DiesAt(1, layer=1, when=7)), 4, join=False)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks.processes):
        time.sleep(0.05)
    codes = sorted(process.exitcode for process in ranks.processes)
    assert codes == [-signal.SIGKILL, 0, 0, 0]
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["lost"] == [1]
    assert found["answers"] == expected
    if copies:  # three ranks of 3 + 3 slots: whatever one holds, another does, too
        assert found["held"] == {"0": 18, "2": 18} and found["read"] == 36
    else:
        assert 12 < found["held"]["0"] <= 24 and found["read"] == found["held"]["0"]
