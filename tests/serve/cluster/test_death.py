"""Requests go on when their worker dies: the same tokens, texts and log-probability bits as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from moesaic.serve.cluster.client import MAX_ATTEMPTS, EngineClient
from moesaic.serve.cluster.worker import State, WorkerHandle
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import WorkerDied
from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies import Plan
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.serve.cluster.workers import Held, all_free, assert_same, client_of, expected, greedy, let, text_of, until

CUTS = (5, 11)  # tokens after which workers die


def signal_to(worker: WorkerHandle, number: int, rank: int = 0) -> int:
    assert worker.ready is not None
    os.kill(worker.ready.pids[rank], number)
    return worker.ready.pids[rank]


def across_the_cut(alone: Engine, prompt: str) -> str:
    """A stop string that begins in the last token before the cut and ends in the first after it."""
    request = alone.request(prompt, greedy(24))
    alone.add(request)
    pieces: list[str] = []
    while request.finish_reason is None:
        pieces += [output.text for output in alone.step()]
    for cut in CUTS:
        before, after = "".join(pieces[:cut]), "".join(pieces[cut:])
        for length in range(1, len(before)):
            stop = before[-length:] + after[:2]
            if "".join(pieces).index(stop) == len(before) - length:
                return stop
    raise AssertionError("this model repeats itself too much")


def kinds(alone: Engine) -> list[Sampling]:
    free = {"max_tokens": 24, "ignore_eos": True}
    return [
        greedy(24),
        Sampling(seed=5, temperature=1.0, **free),
        Sampling(seed=6, temperature=0.8, top_p=0.9, logprobs=3, prompt_logprobs=2, **free),
        Sampling(seed=7, top_k=20, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2, **free),
        Sampling(max_tokens=24, temperature=0.0, grammar=Grammar.regex("((yes|no), ){9}")),
        Sampling(max_tokens=40, seed=8, grammar=Grammar.json({"type": "array", "items": {"type": "integer"}})),
        Sampling(temperature=0.0, stop=(across_the_cut(alone, "6 The number 6 is"), "never said"), **free),
        Sampling(seed=9, min_tokens=16, max_tokens=24),
        Sampling(temperature=0.0, record_routes=True, **free),
        Sampling(seed=3, record_draws=True, top_p=0.8, **free),
        Sampling(seed=11, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5, **free),
        Sampling(seed=12, dry_multiplier=1.5, dry_allowed_length=1, xtc_probability=0.5, bad_words=("number",), **free),
        Sampling(max_tokens=3, temperature=0.0),  # done before anything happens
    ]


async def survive(loop: EngineClient, gate: Path, alone: Engine) -> None:
    """Cut off after some tokens, and once more after some others, with all workers dead at the same time then."""
    asked = [loop.engine.request(f"{n} The number {n} is", params) for n, params in enumerate(kinds(alone))]
    asked += [loop.engine.request("several", Sampling(seed=4, max_tokens=24), sibling=i) for i in range(4)]
    let(gate, CUTS[0])
    answers = [asyncio.create_task(text_of(loop, request)) for request in asked]
    await until(lambda: all(request.written >= CUTS[0] or request.finish_reason for request in asked))
    counts = [request.written for request in asked if request.finish_reason is None]
    assert len(counts) > 10
    signal_to(loop.workers[0], signal.SIGKILL)
    await until(lambda: loop.deaths == 1)
    late = loop.engine.request("a text that waits", embed=True)
    answers.append(asyncio.create_task(text_of(loop, late)))
    let(gate, CUTS[1])
    await until(lambda: all(request.written >= CUTS[1] or request.finish_reason for request in asked))
    await until(lambda: all(worker.state is State.READY for worker in loop.workers))
    for worker in loop.workers:
        signal_to(worker, signal.SIGKILL)
    await until(lambda: loop.deaths == 1 + len(loop.workers))
    assert loop.alive and not loop.ready
    let(gate, 1000)
    texts = await asyncio.gather(*answers)
    for request, text in zip([*asked, late], texts, strict=True):
        assert_same(request, text, alone)
        assert request.cached == 0
    assert loop.resumed >= 20
    assert sum(len(request.tokens) - len(request.prompt) for request in asked) == loop.generated_tokens
    stopped = asked[6]
    assert stopped.finish_reason == "stop" and not expected(alone, stopped)[1].endswith(stopped.sampling.stop[0])
    await all_free(loop)


def test_requests_go_on_after_a_death(directory: Path, gate: Path, alone: Engine) -> None:
    async def ask() -> None:
        async with client_of(directory, 2, policy=Held(gate=gate), reuse_prefixes=False) as loop:
            await survive(loop, gate, alone)

    asyncio.run(ask())


def test_also_with_speculation_and_one_worker(directory: Path, gate: Path, alone: Engine) -> None:
    async def ask() -> None:
        chosen = {"policy": Held(gate=gate), "drafter": Suffix(), "reuse_prefixes": False}
        async with client_of(directory, 1, **chosen) as loop:
            await survive(loop, gate, alone)

    asyncio.run(ask())


@dataclass(frozen=True)
class Deadly(Chunked):
    """A prompt of this length kills its process."""

    length: int = 3

    def choose(self, requests: Sequence[Request], stopped: Sequence[ForwardPass], now: float) -> Plan | ForwardPass:
        if any(len(request.prompt) == self.length for request in requests):
            os._exit(3)
        return super().choose(requests, stopped, now)


def test_a_request_that_kills_its_workers_is_given_up_alone(directory: Path, alone: Engine) -> None:
    async def ask() -> None:
        async with client_of(directory, 1, policy=Deadly()) as loop:
            bad = loop.engine.request([1, 2, 3], greedy(5))
            good = [loop.engine.request(f"the number {n} is one of these", greedy(9)) for n in range(3)]
            answers = [asyncio.create_task(text_of(loop, request)) for request in [bad, *good]]
            with pytest.raises(WorkerDied, match=f"{MAX_ATTEMPTS} workers died at this request"):
                await answers[0]
            for request, answer in zip(good, answers[1:], strict=True):
                assert_same(request, await answer, alone)
            assert loop.deaths == MAX_ATTEMPTS
            await all_free(loop)

    asyncio.run(ask())


def test_when_no_worker_can_start_nobody_waits_for_ever(directory: Path, tmp_path: Path, gate: Path) -> None:
    moved = directory.rename(tmp_path / "moved")

    async def ask() -> None:
        async with client_of(moved, 1, policy=Held(gate=gate)) as loop:
            let(gate, 2)
            request = loop.engine.request("the number", greedy(9))
            answer = asyncio.create_task(text_of(loop, request))
            await until(lambda: request.written == 2)
            moved.rename(directory)
            signal_to(loop.workers[0], signal.SIGKILL)
            with pytest.raises(WorkerDied, match="no worker can be started"):
                await answer
            assert loop.alive and not loop.ready
            directory.rename(moved)  # and when the reason is gone, it serves again
            let(gate, 100)
            assert await text_of(loop, loop.engine.request("the number", greedy(9)))
            await all_free(loop)

    try:
        asyncio.run(ask())
    finally:
        if moved.exists():
            moved.rename(directory)


def test_a_worker_that_stands_still_is_replaced(directory: Path, gate: Path, alone: Engine) -> None:
    """Also one that has nothing to do, so that none waits for it later."""

    async def ask() -> None:
        async with client_of(directory, 2, policy=Held(gate=gate), stall_seconds=6.0) as loop:
            let(gate, 5)
            asked = [loop.engine.request(f"{n} is a number", greedy(24)) for n in range(6)]
            answers = [asyncio.create_task(text_of(loop, request)) for request in asked]
            await until(lambda: all(request.written >= 5 for request in asked))
            assert all(worker.open for worker in loop.workers)
            pid = signal_to(loop.workers[0], signal.SIGSTOP)
            await until(lambda: loop.deaths)
            assert "silent" in loop.workers[0].problem
            let(gate, 100)
            for request, answer in zip(asked, await asyncio.gather(*answers), strict=True):
                assert_same(request, answer, alone)
            await until(lambda: loop.workers[0].ready is not None)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            deaths = loop.deaths
            signal_to(loop.workers[1], signal.SIGSTOP)
            await until(lambda: loop.deaths > deaths)
            await until(lambda: all(worker.state is State.READY for worker in loop.workers))
            await all_free(loop)

    asyncio.run(ask())
