"""Engines in processes of their own generate what one in this process generates, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.api.server import Server, listen, serve
from moesaic.serve.api.service import Service, Settings
from moesaic.serve.bench.server_process import serving
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.engine_process import EngineProcess
from moesaic.serve.cluster.launch import launch, with_workers
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineFailed
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling
from tests.serve.api.test_adapters import write_adapter
from tests.serve.cluster.workers import (
    CACHE,
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


def test_answers_are_those_of_an_engine_in_this_process(
    loop: EngineClient, events: asyncio.Runner, alone: Engine
) -> None:
    params = [
        greedy(9),
        Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        Sampling(max_tokens=12, temperature=0.0, grammar=Grammar.choice(["yes", "no"])),
        Sampling(
            max_tokens=9, seed=6, stop=("e",), logit_bias={7: 2.0}, stop_tokens=frozenset([3]), logprob_tokens=(9, 4)
        ),
    ]
    prompts = [f"{n} The number {n} is a number; def f(x): return x + {n}" for n in range(8)]

    async def ask() -> list[tuple[Request, str]]:
        assert loop.engine.max_length == alone.max_length
        requests = [loop.engine.request(p, params[n % 4]) for n, p in enumerate(prompts)]
        requests.append(loop.engine.request(prompts[0], embed=True))
        texts = await asyncio.gather(*(text_of(loop, request) for request in requests))
        assert all(worker.prefixes.pages for worker in loop.workers)  # all had something to do
        for moment in (0, 1, 3):  # and one that is given up leaves nothing behind
            answers = loop.submit([loop.engine.request(f"the number {moment}", greedy(400)) for _ in range(3)])
            for _ in range(moment):
                await anext(answers)
            answers.close()
        await all_free(loop)
        stats = loop.stats()
        assert stats.aborted == 9 and stats.pages == 2 * alone.cache.pages
        assert stats.finished == 9 and stats.prompt_tokens > 0
        assert all(sum(counts) > 0 for counts in stats.experts.values())
        return list(zip(requests, texts, strict=True))

    for request, text in events.run(ask()):
        assert_same(request, text, alone)


def test_a_prompt_goes_where_its_beginning_is(loop: EngineClient, events: asyncio.Runner) -> None:
    async def ask() -> None:
        starts = ["one two three four five six seven eight nine ten " * 3, "other words come here for a while " * 3]
        for turn in range(4):
            for start in starts if turn % 2 else reversed(starts):
                request = loop.engine.request(f"{start} {turn}", greedy(1))
                await text_of(loop, request)
                if turn:
                    assert request.cached > 0.6 * len(request.prompt)
        assert all(worker.prefixes.pages for worker in loop.workers)

    events.run(ask())


def test_a_prefix_is_known_by_its_whole_pages_and_its_namespace() -> None:
    seen = PrefixIndex()
    seen.add("a", list(range(40)), 16)
    assert seen.tokens("a", list(range(48)), 16) == 32
    assert seen.tokens("b", list(range(48)), 16) == 0
    assert seen.tokens("a", [9, *range(47)], 16) == 0
    small = PrefixIndex(max_pages=2)
    small.add("a", list(range(32)), 16)
    small.add("a", list(range(100, 132)), 16)
    assert small.tokens("a", list(range(32)), 16) == 0 and len(small.pages) == 2


def test_adapters_are_in_every_worker_also_in_one_begun_anew(directory: Path, tmp_path: Path, gate: Path) -> None:
    path, other = write_adapter(tmp_path / "mine", 1), write_adapter(tmp_path / "other", 2)
    one = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    one.load_adapter("mine", path)
    one.load_adapter("other", other)
    sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    plain, adapted, changed = (
        one.generate(["The number 7 is"], adapter=name, **sampling)[0].text for name in (None, "mine", "other")
    )
    assert len({plain, adapted, changed}) == 3

    async def ask() -> None:
        first = {"first": str(path)}
        async with client_of(directory, 2, first, policy=Held(gate=gate), max_requests=8) as loop:

            async def said(name: str | None) -> list[str]:
                asked = [loop.engine.request("The number 7 is", greedy(12), adapter=name) for _ in range(4)]
                return await asyncio.gather(*(text_of(loop, request) for request in asked))

            await loop.load_adapter("mine", str(path))
            for turn in range(2):
                assert await said("mine") == await said("first") == [adapted] * 4
                assert await said(None) == [plain] * 4
                if turn == 0:
                    for worker in loop.workers:
                        assert worker.ready is not None
                        os.kill(worker.ready.pids[0], signal.SIGKILL)
                    await until(lambda: loop.deaths == 2)
            let(gate, 5)
            held = loop.engine.request("The number 7 is", greedy(12), adapter="mine")
            late = loop.engine.request("The number 7 is", greedy(12), adapter="mine")
            saying = asyncio.create_task(text_of(loop, held))
            await until(lambda: held.written == 5)
            await loop.load_adapter("mine", str(other))  # the same name, another adapter
            await until(lambda: all(worker.ready is not None for worker in loop.workers))  # one may have served alone
            for worker in loop.workers:
                assert worker.ready is not None
                os.kill(worker.ready.pids[0], signal.SIGKILL)
            await until(lambda: loop.deaths == 4)
            let(gate, 100)
            assert await said("mine") == [changed] * 4
            assert await saying == adapted
            with pytest.raises(UserError, match="unloaded"):
                await text_of(loop, late)
            await loop.unload_adapter("mine")
            with pytest.raises(UserError, match="there is no"):
                loop.engine.request("a", greedy(2), adapter="mine")
            with pytest.raises(UserError):
                await loop.load_adapter("broken", str(tmp_path))
            await loop.unload_adapter("first")
            assert not loop.adapters.paths and not loop.adapters.retired and not loop.engine.adapters
            assert not any(worker.adapters for worker in loop.workers)
            await all_free(loop)

    asyncio.run(ask())


def test_a_request_the_engine_cannot_take_fails_alone(loop: EngineClient, events: asyncio.Runner) -> None:
    async def ask() -> None:
        bad, good = loop.engine.request("one", greedy(3)), loop.engine.request("two", greedy(3))
        bad.prompt = [10**9]  # which the front would have refused
        lost = asyncio.create_task(text_of(loop, bad))
        assert await text_of(loop, good)
        with pytest.raises(EngineFailed, match="vocabulary"):
            await lost
        await all_free(loop)

    events.run(ask())


def test_what_keeps_it_from_starting_is_told(directory: Path) -> None:
    with pytest.raises(UserError, match="hold no page"):
        EngineProcess.start(options(directory, cache_bytes=1)).wait()
    with pytest.raises(UserError, match="at least 1"):
        launch(options(directory), replicas=0)


def test_it_serves_over_http(directory: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}

    async def ask() -> None:
        engine, make_loop = with_workers([options(directory)])
        listener = listen("127.0.0.1", 0)
        server: list[Server] = []

        def ready(started: Server, service: Service) -> None:
            server.append(started)

        settings = Settings(name="tiny")
        serving = asyncio.create_task(
            serve(engine, settings, listener, ready=ready, signals=False, make_loop=make_loop)
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            while not server:
                await asyncio.sleep(0.01)
            whole = (await client.post("/v1/completions", json=body)).json()
            lines = (await client.post("/v1/completions", json=body | usage)).text.split("\n\n")
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
            text = "".join(choice["text"] for event in events for choice in event["choices"])
            assert text == whole["choices"][0]["text"]
            assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 20
            assert (await client.get("/health")).status_code == 200
            assert 'moesaic:generation_tokens_total{model_name="tiny"} 40.0' in (await client.get("/metrics")).text
        server[0].should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    asyncio.run(ask())


def test_the_command_serves_with_replicas(directory: Path) -> None:
    with (
        serving(directory, ["--replicas", "2", "--threads", "1"]) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        form = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0, "n": 3}
        first, again = [client.post("/v1/chat/completions", json=form).json() for _ in range(2)]
        assert [choice["message"] for choice in first["choices"]] == [choice["message"] for choice in again["choices"]]
        assert first["usage"]["completion_tokens"] > 0 and len(first["choices"]) == 3
        echo = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 1, "ignore_eos": True}
        (choice,) = client.post("/v1/completions", json=echo).json()["choices"]
        assert choice["text"].startswith("hello") and len(choice["logprobs"]["tokens"]) > 5
        assert client.get("/ready").status_code == 200
        assert "moesaic:generation_tokens_total" in client.get("/metrics").text


def test_stats_are_those_of_all_workers_dead_or_alive(directory: Path) -> None:
    async def ask() -> None:
        async with client_of(directory, 2) as loop:
            asked = [loop.engine.request(f"{n} green bottles hanging on the wall", greedy(6)) for n in range(8)]
            await asyncio.gather(*(text_of(loop, request) for request in asked))
            await text_of(loop, loop.engine.request("1 green bottles hanging on the wall", greedy(6)))
            await loop.read_stats()
            stats = loop.stats()
            computed = sum(len(request.prompt) for request in asked)
            assert 0 < stats.prompt_tokens <= computed + len(asked[1].prompt)
            assert stats.prefix_hits > 0 and stats.prefix_queries >= computed - len(asked)
            assert stats.pages > 0 and stats.pages_in_use == 0
            assert (stats.running, stats.waiting, stats.finished) == (0, 0, 9)
            assert stats.experts and all(sum(counts) > computed for counts in stats.experts.values())
            ready = loop.workers[0].ready
            assert ready is not None
            os.kill(ready.pids[0], signal.SIGKILL)
            await until(lambda: loop.deaths == 1)
            await text_of(loop, loop.engine.request("a new prompt", greedy(2)))
            await loop.read_stats()
            assert loop.stats().prompt_tokens > stats.prompt_tokens  # what the dead one had done still counts

    asyncio.run(ask())
