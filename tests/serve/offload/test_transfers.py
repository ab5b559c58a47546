"""Copies beside other work: waited for, run by whoever needs them first, cancelled, failing where they are needed."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.engine import Engine
from moesaic.serve.offload.loading import load_served
from moesaic.serve.offload.transfers import ThreadTransfers
from tests.serve.offload.models import answers, mixture
from tests.waiting import until


def test_whoever_waits_runs_what_has_not_begun() -> None:
    transfers, begun, gate = ThreadTransfers(), threading.Event(), threading.Event()
    ran: list[str] = []

    def block() -> None:
        begun.set()
        gate.wait()
        ran.append(threading.current_thread().name)

    blocked = transfers.begin(block)
    begun.wait()
    waiting = transfers.begin(lambda: ran.append(threading.current_thread().name))
    unwanted = transfers.begin(lambda: ran.append("unwanted"))
    waiting.wait()
    assert unwanted.cancel() and not waiting.cancel()
    gate.set()
    blocked.wait()
    assert ran == [threading.current_thread().name, "offload"]


def test_an_error_shows_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise UserError("file", "is gone")

    with pytest.raises(UserError, match="is gone"):
        ThreadTransfers().begin(fail).wait()


def test_the_thread_ends_with_its_owner() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "offload"}
    transfers = ThreadTransfers()
    mine = [t for t in threading.enumerate() if t.name == "offload" and t not in before]
    assert len(mine) == 1
    del transfers
    gc.collect()
    until(lambda: not mine[0].is_alive())


@pytest.mark.parametrize("offload", ["experts", "weights"])
def test_a_file_that_fails_ends_a_request_and_not_the_engine(tmp_path: Path, offload) -> None:
    """After the disk is well again, answers are right again."""
    directory = mixture(tmp_path / "model")
    options = {"expert_cache_bytes": 8 * 3 * 32 * 32 * 4} if offload == "experts" else {}
    model = load_served(directory, offload=offload, threads=1, **options)
    whole = answers(moesaic.load(directory, threads=1))
    assert answers(model) == whole
    file = next(directory.glob("*.safetensors"))
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 4])  # the open file, which is now shorter
    with pytest.raises(UserError, match="became shorter"):
        Engine(model, cache_bytes=1 << 22, seed=3).generate([list(range(30))], max_tokens=30, temperature=0.0)
    file.write_bytes(good)
    assert answers(model) == whole
    assert torch.get_num_threads() == 1
