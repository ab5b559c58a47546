"""A worker that is a group of ranks: the same answers, also when any of its ranks dies or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest

from moesaic.errors import UserError
from moesaic.serve.bench.server_process import serving
from moesaic.serve.cluster.launch import launch
from moesaic.serve.cluster.worker import State
from moesaic.serve.core.engine import Engine
from tests.serve.cluster.test_death import signal_to
from tests.serve.cluster.workers import (
    Held,
    all_free,
    assert_same,
    client_of,
    greedy,
    let,
    options,
    text_of,
    until,
)
from tests.waiting import PATIENCE


def test_any_rank_may_die_or_stand_still(directory: Path, gate: Path, alone: Engine) -> None:
    """Its group is replaced, and requests go on."""
    faults = [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0)]

    async def ask() -> None:
        async with client_of(directory, 1, layout="tp=2", policy=Held(gate=gate), stall_seconds=6.0) as loop:
            (worker,) = loop.workers
            let(gate, 3)
            asked = [loop.engine.request(f"{n} is a number", greedy(18)) for n in range(2)]
            answers = [asyncio.create_task(text_of(loop, request)) for request in asked]
            for turn, (number, rank) in enumerate(faults):
                await until(lambda turn=turn: all(request.written >= 3 * (turn + 1) for request in asked))
                assert worker.ready is not None
                ranks, deaths = worker.ready.pids, loop.deaths
                signal_to(worker, number, rank)
                await until(lambda deaths=deaths: loop.deaths > deaths)
                let(gate, 3 * (turn + 2))
                await until(lambda: worker.state is State.READY)
                for pid in ranks:
                    with pytest.raises(ProcessLookupError):
                        os.kill(pid, 0)
            let(gate, 1000)
            for request, answer in zip(asked, await asyncio.gather(*answers), strict=True):
                assert_same(request, answer, alone)
            await all_free(loop)
            assert [stats.rank for stats in worker.rank_stats] == [0, 1]
            assert all(stats.weights > 0 and stats.sent > 0 for stats in worker.rank_stats)

    asyncio.run(ask())


def test_the_command_serves_a_group(directory: Path, alone: Engine) -> None:
    with (
        serving(directory, ["--layout", "tp=2", "--threads", "1", "--cache-gb", "0.01"]) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
    ):
        said = client.completions.create(
            model=directory.name,
            prompt="The number 7 is",
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        (wanted,) = alone.generate(["The number 7 is"], max_tokens=20, temperature=0.0, ignore_eos=True)
        assert said.choices[0].text == wanted.text
        assert httpx.get(f"{url}/ready").status_code == 200


def test_a_layout_that_cannot_be_served_is_refused_in_words(directory: Path) -> None:
    for layout in ("pp=2", "tp=3", "tp=two"):
        with pytest.raises(UserError):
            launch(options(directory, layout=layout))
