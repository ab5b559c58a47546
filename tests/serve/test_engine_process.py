"""An engine in a process of its own generates what one in this process generates, and its death is survived."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.api.server import Server, listen, serve
from moesaic.serve.api.service import Service, Settings
from moesaic.serve.cluster.engine_process import EngineOptions, EngineProcess
from moesaic.serve.cluster.launch import in_own_process
from moesaic.serve.cluster.process_loop import ProcessLoop
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineFailed, ReplicaDied
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling
from tests.serve.api.test_adapters import write_adapter
from tests.serve.made import talking_model
from tests.waiting import PATIENCE

CACHE = 4 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("process") / "tiny")


@pytest.fixture(scope="module")
def alone(directory: Path) -> Engine:
    return Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)


def options(directory: Path, max_requests: int = 64) -> EngineOptions:
    return EngineOptions(directory, {"threads": 1}, {"cache_bytes": CACHE, "max_requests": max_requests})


def loop_of(directory: Path, max_requests: int = 64) -> ProcessLoop:
    frontend, make = in_own_process(options(directory, max_requests))
    return make(frontend)


async def text_of(loop: ProcessLoop, request: Request) -> str:
    answers = loop.submit([request])
    try:
        return "".join([output.text async for output in answers])
    finally:
        answers.close()


async def all_free(loop: ProcessLoop) -> None:
    await asyncio.wait_for(loop.until_idle(), PATIENCE)
    while True:
        await loop.read_stats()
        if not loop.stats().pages_in_use:
            break
    assert not loop.open and not loop._asked and not loop.engine.scheduler.requests


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def test_answers_are_those_of_an_engine_in_this_process(directory: Path, alone: Engine) -> None:
    params = [
        greedy(9),
        Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        Sampling(max_tokens=12, temperature=0.0, grammar=Grammar.choice(["yes", "no"])),
        Sampling(max_tokens=9, seed=6, stop=("e",), logit_bias={7: 2.0}, stop_tokens=frozenset([3])),
    ]
    prompts = [f"{n} The number {n} is a number; def f(x): return x + {n}" for n in range(8)]

    async def ask() -> list[tuple[Request, str]]:
        async with loop_of(directory) as loop:
            assert loop.engine.max_length == alone.max_length
            requests = [loop.engine.request(p, params[n % 4]) for n, p in enumerate(prompts)]
            requests.append(loop.engine.request(prompts[0], embed=True))
            texts = await asyncio.gather(*(text_of(loop, request) for request in requests))
            for moment in (0, 1, 3):  # and one that is given up leaves nothing behind
                answers = loop.submit([loop.engine.request(f"the number {moment}", greedy(400)) for _ in range(3)])
                for _ in range(moment):
                    await anext(answers)
                answers.close()
            await all_free(loop)
            stats = loop.stats()
            assert stats.aborted == 9 and stats.pages == alone.cache.pages
            assert all(sum(counts) > 0 for counts in stats.experts.values())
            return list(zip(requests, texts, strict=True))

    *generated, (embedded, _) = asyncio.run(ask())
    for number, (request, text) in enumerate(generated):
        wanted = alone.request(prompts[number], params[number % 4])
        wanted.seed = request.seed
        alone.add(wanted)
        pieces = []
        while wanted.finish_reason is None:
            pieces += [output.text for output in alone.step()]
        assert (request.tokens, text) == (wanted.tokens, "".join(pieces))
        assert request.finish_reason == wanted.finish_reason and request.versions == wanted.versions
        assert [one.token for one in request.logprobs] == [one.token for one in wanted.logprobs]
        for ours, theirs in zip(request.logprobs, wanted.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(request.prompt_logprobs) == len(wanted.prompt_logprobs)
    assert embedded.hidden_D is not None and embedded.hidden_D.shape == (alone.model.config.hidden,)


def test_a_process_that_dies_is_restarted_with_its_adapters(directory: Path, tmp_path: Path, alone: Engine) -> None:
    path = write_adapter(tmp_path / "mine", 1)
    one = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    one.load_adapter("mine", path)
    sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    adapted = one.generate(["The number 7 is"], adapter="mine", **sampling)[0].text

    async def ask() -> None:
        async with loop_of(directory, max_requests=1) as loop:
            await loop.load_adapter("mine", str(path))
            writing = loop.engine.request("the number", greedy(300))
            answers = loop.submit([writing])
            await anext(answers)
            waiting = [
                asyncio.create_task(text_of(loop, loop.engine.request("The number 7 is", greedy(12), adapter="mine")))
                for _ in range(3)
            ]
            await asyncio.sleep(0)
            loop.process.process.kill()
            with pytest.raises(ReplicaDied, match="died at this request; send it again"):
                async for _ in answers:
                    pass
            answers.close()
            assert not loop.alive and loop.deaths == 1
            assert await asyncio.gather(*waiting) == [adapted] * 3
            assert loop.alive
            await loop.unload_adapter("mine")
            with pytest.raises(UserError, match="there is no"):
                loop.engine.request("a", greedy(2), adapter="mine")
            with pytest.raises(UserError):
                await loop.load_adapter("broken", str(tmp_path))
            await all_free(loop)
            assert loop.stats().prompt_tokens > 0

    asyncio.run(ask())


def test_a_request_the_engine_cannot_take_fails_alone(directory: Path) -> None:
    async def ask() -> None:
        async with loop_of(directory) as loop:
            bad, good = loop.engine.request("one", greedy(3)), loop.engine.request("two", greedy(3))
            bad.prompt = [10**9]  # which the frontend would have refused
            lost = asyncio.create_task(text_of(loop, bad))
            assert await text_of(loop, good)
            with pytest.raises(EngineFailed, match="vocabulary"):
                await lost
            await all_free(loop)

    asyncio.run(ask())


def test_what_keeps_it_from_starting_is_told(directory: Path) -> None:
    broken = options(directory)
    broken.engine_options["cache_bytes"] = 1
    with pytest.raises(UserError, match="hold no page"):
        EngineProcess.start(broken).wait()


def test_it_serves_over_http(directory: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}

    async def ask() -> None:
        engine, make_loop = in_own_process(options(directory))
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
