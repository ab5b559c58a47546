"""Replicas generate what one engine generates, and one that dies takes no requests of others with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.bench.server_process import serving
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.cluster.replica import Replica
from moesaic.serve.cluster.replicas import Replicas, frontend_engine
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import ReplicaDied
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Output, Request, Sampling
from tests.serve.api.test_adapters import write_adapter
from tests.serve.made import talking_model
from tests.waiting import PATIENCE

ray = pytest.importorskip("ray")
CACHE = 4 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("replicas") / "tiny")


@pytest.fixture(scope="module")
def alone(directory: Path) -> Engine:
    return Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def replicas(directory: Path, count: int = 2, **options) -> Replicas:
    frontend = frontend_engine(directory, cache_bytes=CACHE)
    return Replicas(
        frontend, directory, count, load_options={"threads": 1}, engine_options={"cache_bytes": CACHE, **options}
    )


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(directory: Path, events: asyncio.Runner, cluster: None) -> Iterator[Replicas]:
    """Two, for all tests that leave replicas as they are: starting them takes longer than what they are asked."""
    loop = replicas(directory)
    events.run(loop.__aenter__())
    yield loop
    events.run(loop.__aexit__())


@pytest.fixture
def loop(shared: Replicas) -> Replicas:
    """To which every prompt is new, as to replicas that have just started."""
    for replica in shared.replicas:
        replica.prefixes = PrefixIndex()
    return shared


async def text_of(loop: Replicas, request: Request) -> str:
    answers = loop.submit([request])
    try:
        return "".join([output.text async for output in answers])
    finally:
        answers.close()


async def all_free(loop: Replicas) -> None:
    for replica in loop.replicas:
        while (await replica.actor.stats.remote()).pages_in_use:
            await asyncio.sleep(0.01)
    assert not loop.open and not loop._queues and not loop._assigned and not loop.engine.scheduler.requests
    assert all(replica.pending_tokens == 0 for replica in loop.replicas)


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def test_answers_are_those_of_one_engine(loop, events, alone):
    params = [
        greedy(9),
        Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        Sampling(max_tokens=12, temperature=0.0, grammar=Grammar.choice(["yes", "no"])),
        Sampling(max_tokens=9, seed=6, stop=("e",), logit_bias={7: 2.0}, stop_tokens=frozenset([3])),
    ]
    prompts = [f"{n} The number {n} is a number; def f(x): return x + {n}" for n in range(8)]

    async def ask() -> list[tuple[Request, str]]:
        requests = [loop.engine.request(p, params[n % 4]) for n, p in enumerate(prompts)]
        requests.append(loop.engine.request(prompts[0], embed=True))
        texts = await asyncio.gather(*(text_of(loop, request) for request in requests))
        await all_free(loop)
        assert all(replica.prefixes.pages for replica in loop.replicas)  # both had something to do
        return list(zip(requests, texts, strict=True))

    *generated, (embedded, _) = events.run(ask())
    for number, (request, text) in enumerate(generated):
        wanted = alone.request(prompts[number], params[number % 4])
        wanted.seed = request.seed
        alone.add(wanted)
        pieces = []
        while wanted.finish_reason is None:
            pieces += [output.text for output in alone.step()]
        assert (request.tokens, text) == (wanted.tokens, "".join(pieces))
        assert request.finish_reason == wanted.finish_reason
        assert [one.token for one in request.logprobs] == [one.token for one in wanted.logprobs]
        for ours, theirs in zip(request.logprobs, wanted.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(request.prompt_logprobs) == len(wanted.prompt_logprobs)
    assert embedded.hidden_D is not None and embedded.hidden_D.shape == (alone.model.config.hidden,)


def test_a_prompt_goes_where_its_beginning_is(loop, events):
    async def ask() -> None:
        starts = ["one two three four five six seven eight nine ten " * 3, "other words come here for a while " * 3]
        for round in range(4):
            for start in starts if round % 2 else reversed(starts):
                request = loop.engine.request(f"{start} {round}", greedy(1))
                await text_of(loop, request)
                if round:
                    assert request.cached > 0.6 * len(request.prompt)
        assert all(replica.prefixes.pages for replica in loop.replicas)

    events.run(ask())


def test_a_busy_replica_is_left_alone_even_if_it_knows_the_prompt():
    seen = PrefixIndex()
    seen.add("a", list(range(40)), 16)
    assert seen.tokens("a", list(range(48)), 16) == 32
    assert seen.tokens("b", list(range(48)), 16) == 0
    assert seen.tokens("a", [9, *range(47)], 16) == 0
    small = PrefixIndex(max_pages=2)
    small.add("a", list(range(32)), 16)
    small.add("a", list(range(100, 132)), 16)
    assert small.tokens("a", list(range(32)), 16) == 0 and len(small.pages) == 2


def hold(replica: Replica) -> None:
    """In the replica: no step after the first that has outputs, until `gate` is set."""
    step, written, replica.gate = replica.engine.step, threading.Event(), threading.Event()

    def step_unless_held() -> list[Output]:
        if written.is_set():
            replica.gate.wait()
        outputs = step()
        if outputs:
            written.set()
        return outputs

    replica.engine.step = step_unless_held


def test_a_dead_replica_loses_only_the_answers_it_was_writing(directory, alone):
    long, short = greedy(40), greedy(4)

    async def ask() -> None:
        async with replicas(directory, max_requests=1) as loop:
            await asyncio.gather(*(replica.actor.__ray_call__.remote(hold) for replica in loop.replicas))
            writing = [loop.engine.request(f"the number {n}", long) for n in range(2)]
            answers = [loop.submit([request]) for request in writing]
            for each in answers:  # both replicas write
                await anext(each)
            queued = [loop.engine.request(f"a question {n} to answer", short) for n in range(6)]
            waiting = [asyncio.create_task(text_of(loop, request)) for request in queued]
            while not all(request.number in loop._assigned for request in queued):
                await asyncio.sleep(0)
            dead, living = (loop._assigned[request.number] for request in writing)
            assert {loop._assigned[request.number].number for request in queued} == {0, 1}  # behind both
            ray.kill(dead.actor)
            with pytest.raises(ReplicaDied, match="died; send it again"):
                async for _ in answers[0]:
                    pass
            answers[0].close()
            await living.actor.__ray_call__.remote(lambda replica: replica.gate.set())
            async for _ in answers[1]:
                pass
            await asyncio.gather(*waiting)
            assert writing[1].finish_reason == "length"
            for request in [writing[1], *queued]:
                (expected,) = alone.generate([request.prompt], **vars(request.sampling))
                assert request.tokens[len(request.prompt) :] == expected.tokens
            assert loop.deaths == 1
            while not dead.ready:  # another takes its place
                await asyncio.sleep(0.05)
            await asyncio.gather(*(text_of(loop, loop.engine.request(f"again {n}", short)) for n in range(4)))
            await all_free(loop)

    asyncio.run(ask())


def test_a_request_that_is_given_up_leaves_nothing_behind(loop, events):
    async def ask() -> None:
        for moment in (0, 1, 3):
            answers = loop.submit([loop.engine.request(f"the number {moment}", greedy(400)) for _ in range(3)])
            for _ in range(moment):
                await anext(answers)
            answers.close()
        await asyncio.wait_for(loop.until_idle(), PATIENCE)
        while loop._tasks:
            await asyncio.sleep(0.01)
        await all_free(loop)

    events.run(ask())


def test_the_command_serves_with_replicas(directory):
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


def test_what_replicas_cannot_do_is_refused(directory):
    with pytest.raises(UserError, match="at least 1"):
        replicas(directory, count=0)

    async def change() -> None:
        loop = replicas(directory)
        with pytest.raises(UserError, match="cannot be changed"):
            await loop.call(lambda: None)

    asyncio.run(change())


def test_adapters_are_loaded_in_every_replica_also_in_one_begun_anew(directory, tmp_path):
    path = write_adapter(tmp_path / "mine", 1)
    one = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    one.load_adapter("mine", path)
    plain = one.generate(["The number 7 is"], max_tokens=12, temperature=0.0, ignore_eos=True)[0].text
    adapted = one.generate(["The number 7 is"], adapter="mine", max_tokens=12, temperature=0.0, ignore_eos=True)[0].text
    assert plain != adapted

    async def serve() -> None:
        async with replicas(directory) as loop:
            await loop.load_adapter("mine", str(path))
            for round in range(2):
                ask = [loop.engine.request("The number 7 is", greedy(12), adapter="mine") for _ in range(4)]
                assert await asyncio.gather(*(text_of(loop, request) for request in ask)) == [adapted] * 4
                assert await text_of(loop, loop.engine.request("The number 7 is", greedy(12))) == plain
                if round == 0:
                    for replica in loop.replicas:
                        ray.kill(replica.actor)
            await loop.unload_adapter("mine")
            with pytest.raises(UserError, match="there is no"):
                loop.engine.request("a", greedy(2), adapter="mine")
            with pytest.raises(UserError):
                await loop.load_adapter("broken", str(tmp_path))
            assert not loop.adapters and not loop.engine.adapters

    asyncio.run(serve())


def test_metrics_are_those_of_all_replicas(directory):
    async def serve() -> None:
        async with replicas(directory) as loop:
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
            layers = stats.experts
            assert layers and all(sum(counts) > computed for counts in layers.values())
            before = stats.prompt_tokens
            ray.kill(loop.replicas[0].actor)
            await text_of(loop, loop.engine.request("a new prompt", greedy(2)))
            await loop.read_stats()
            assert loop.stats().prompt_tokens > before  # what the dead one had done still counts

    asyncio.run(serve())
