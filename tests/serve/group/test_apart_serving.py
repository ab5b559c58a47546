"""Attention and experts apart behind the client: an expert rank dies or stands still, requests go on, it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.engine import Engine
from moesaic.serve.group.apart.ranks import apart_layout, chosen_layout
from moesaic.serve.group.experts.rebalancing import for_engine
from tests.serve.cluster.workers import CACHE, Held, client_of, greedy, let, until
from tests.serve.made import talking_model
from tests.waiting import PATIENCE

PROMPTS = ["The number 7 is a", "yes or no, as", '{"name": "x", "value":']


async def begun_again(directory: Path, gate: Path) -> None:
    """A rank that attends is killed: all ranks are started again, and the answers go on where they were."""
    alone = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    expected = [one.tokens for one in alone.generate(PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)]
    let(gate, 6)
    async with client_of(directory, layout="tp=2 experts=1", policy=Held(gate=gate)) as client:
        worker = client.workers[0].worker
        assert worker is not None
        requests = [client.engine.request(prompt, greedy(24)) for prompt in PROMPTS]
        streams = [client.submit([request]) for request in requests]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(request.written >= 6 for request in requests))
        os.kill(worker.processes[1].pid, signal.SIGKILL)
        let(gate, 24)
        assert await asyncio.wait_for(asyncio.gather(*reading), PATIENCE) == expected
        assert client.workers[0].deaths == 1
        assert all(process.exitcode is not None for process in worker.processes), "nothing of the old group is left"


async def read(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.tokens]


async def lost_and_found(directory: Path, gate: Path, number: int) -> None:
    """Signal an expert rank in the middle of answers; all are as one engine gives them; then it is there again."""
    alone = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    expected = [one.tokens for one in alone.generate(PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)]
    let(gate, 6)
    client = client_of(directory, layout="tp=1 experts=2", policy=Held(gate=gate), stall_seconds=6.0)
    async with client:
        worker = client.workers[0].worker
        assert worker is not None
        before = worker.processes[2].pid
        requests = [client.engine.request(prompt, greedy(24)) for prompt in PROMPTS]
        streams = [client.submit([request]) for request in requests]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(request.written >= 6 for request in requests))
        os.kill(before, number)
        let(gate, 24)
        found = await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
        assert found == expected
        assert client.workers[0].deaths == 0, "the engine itself never stopped"
        await until(lambda: worker.processes[2].pid != before and worker.spare[2].heard)
        # One more request finds all ranks: it is let in before a step, once it has loaded.
        again = [one.tokens for one in alone.generate(PROMPTS[:1], max_tokens=8, temperature=0.0, ignore_eos=True)]
        for _ in range(3):
            request = client.engine.request(PROMPTS[0], greedy(8))
            stream = client.submit([request])
            assert [await asyncio.wait_for(read(stream), PATIENCE)] == again


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_requests_go_on_when_an_expert_rank_is_lost(tmp_path: Path, number: int) -> None:
    directory = talking_model(tmp_path / "model")
    asyncio.run(lost_and_found(directory, tmp_path / "gate", number))


def test_a_rank_that_attends_takes_the_group_with_it(tmp_path: Path) -> None:
    asyncio.run(begun_again(talking_model(tmp_path / "model"), tmp_path / "gate"))


def test_what_the_command_says() -> None:
    assert chosen_layout(None, "2", 6) == "tp=2 experts=6"
    assert chosen_layout("tp=2 ep=4", None, None) == "tp=2 ep=4"
    layout = apart_layout(chosen_layout(None, "tp=2 dp=2", 3))
    assert (layout.attention.tp, layout.attention.dp, layout.experts, layout.devices) == (2, 2, 3, 7)
    for words, asked in (
        ("needs --experts", (None, "2", None)),
        ("needs --attention", (None, None, 2)),
        ("no place beside", ("tp=2", "2", 2)),
        ("ranks of their own", (None, "ep=2", 2)),
    ):
        with pytest.raises(UserError, match=words):
            chosen_layout(*asked)
    assert for_engine(2, 0, "ep=2") == {"expert_replicas": 2} and for_engine(0, 0, "") == {}
    with pytest.raises(UserError, match="several ranks"):
        for_engine(0, 100, "")
