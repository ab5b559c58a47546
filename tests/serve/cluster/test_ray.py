"""Workers on Ray generate what one engine generates; what dies or stands still is replaced, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moesaic.serve.bench.server_process import serving
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.launch import with_workers
from moesaic.serve.cluster.ray_worker import OnRay
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Sampling
from tests.serve.cluster.workers import Held, all_free, assert_same, greedy, let, options, text_of, until
from tests.waiting import PATIENCE

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def on_ray(directory: Path, gate: Path, stall_seconds: float = 20.0) -> EngineClient:
    wanted = options(directory, policy=Held(gate=gate), stall_seconds=stall_seconds)
    frontend, make = with_workers([wanted] * 2, start_worker=OnRay())
    made: EngineClient = make(frontend)
    return made


def test_answers_are_those_of_one_engine_whatever_happens(directory: Path, gate: Path, alone: Engine) -> None:
    params = [
        greedy(24),
        Sampling(max_tokens=24, seed=5, temperature=1.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        Sampling(max_tokens=24, temperature=0.0, grammar=Grammar.regex("(yes|no){12}")),
        Sampling(max_tokens=24, seed=6, stop=("e",), logit_bias={7: 2.0}, stop_tokens=frozenset([3])),
    ]

    async def ask() -> None:
        async with on_ray(directory, gate, stall_seconds=8.0) as loop:
            let(gate, 6)
            asked = [loop.engine.request(f"{n} The number {n} is a number", params[n % 4]) for n in range(8)]
            asked.append(loop.engine.request("a text", embed=True))
            answers = [asyncio.create_task(text_of(loop, request)) for request in asked]
            await until(lambda: all(request.written >= 6 or request.finish_reason for request in asked))
            first, second = (worker.worker for worker in loop.workers)
            ray.kill(first.actors[0])
            await until(lambda: loop.deaths == 1)
            let(gate, 12)
            await until(lambda: all(request.written >= 12 or request.finish_reason for request in asked))
            assert loop.workers[1].ready is not None
            stopped = loop.workers[1].ready.pids[0]
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: loop.deaths >= 2)
            let(gate, 100)
            for request, text in zip(asked, await asyncio.gather(*answers), strict=True):
                assert_same(request, text, alone)
            assert loop.resumed > 0
            await until(lambda: all(worker.ready is not None for worker in loop.workers))  # both are there again
            await until(lambda: gone(stopped))
            await asyncio.gather(*(text_of(loop, loop.engine.request(f"again {n}", greedy(4))) for n in range(4)))
            await all_free(loop)
            assert second is not loop.workers[1].worker

    asyncio.run(ask())


def test_a_group_of_actors_is_one_engine(directory: Path, gate: Path, alone: Engine) -> None:
    async def ask() -> None:
        wanted = options(directory, layout="tp=2", policy=Held(gate=gate))
        frontend, make = with_workers([wanted], start_worker=OnRay())
        async with make(frontend) as loop:
            let(gate, 4)
            request = loop.engine.request("The number 7 is", greedy(10))
            answer = asyncio.create_task(text_of(loop, request))
            await until(lambda: request.written == 4)
            ray.kill(loop.workers[0].worker.actors[1])
            await until(lambda: loop.deaths == 1)
            let(gate, 100)
            assert_same(request, await answer, alone)
            await all_free(loop)

    asyncio.run(ask())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_command_serves_on_ray(directory: Path) -> None:
    with (
        serving(directory, ["--replicas", "2", "--ray", "local", "--threads", "1"]) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        form = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0, "n": 3}
        first, again = [client.post("/v1/chat/completions", json=form).json() for _ in range(2)]
        assert [choice["message"] for choice in first["choices"]] == [choice["message"] for choice in again["choices"]]
        assert client.get("/ready").status_code == 200
