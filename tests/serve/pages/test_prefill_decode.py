"""A prompt computed by one engine and a completion by another are what one engine gives, to the bit, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import moesaic
from moesaic.serve.cluster.client import EngineClient, OpenRequest
from moesaic.serve.cluster.worker import State
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.memory import page_bytes
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.pages.transport import nixl_package
from tests.serve.api.test_adapters import write_adapter
from tests.serve.cluster.workers import CACHE, all_free, assert_same, greedy, text_of, until
from tests.serve.pages.apart import apart_client, stats_of, worker_of

PROMPTS = [f"{n} The number {n} is a number; def f(x): return x + {n}" * (1 + n % 3) for n in range(10)]
PARAMS = [
    greedy(9),
    Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2, ignore_eos=True),
    Sampling(max_tokens=12, temperature=0.0, grammar=Grammar.choice(["yes", "no"])),
    Sampling(max_tokens=30, seed=6, stop=("e", "number is"), logit_bias={7: 2.0}, stop_tokens=frozenset([3])),
    Sampling(max_tokens=5, seed=5, prompt_logprobs=1, record_routes=True, ignore_eos=True),
    Sampling(max_tokens=1, seed=8),
]


def test_answers_and_bytes(apart: EngineClient, events: asyncio.Runner, alone: Engine) -> None:
    async def ask() -> list[tuple[Request, str]]:
        before = await stats_of(apart, "decode"), await stats_of(apart, "prefill")
        plain = [apart.engine.request(prompt, greedy(4)) for prompt in PROMPTS]
        texts = [await text_of(apart, request) for request in plain]  # one after the other
        await all_free(apart)
        decode, prefill = await stats_of(apart, "decode"), await stats_of(apart, "prefill")
        size, pages = apart.engine.page_pool.size, 0
        shared: set[tuple[int, ...]] = set()
        for request in plain:  # every page once, also the last, partly filled
            ends = [*range(size, len(request.prompt), size), len(request.prompt)]
            pages += len({tuple(request.prompt[:end]) for end in ends} - shared)
            shared |= {tuple(request.prompt[:end]) for end in ends if end % size == 0}
        formula = pages * page_bytes(alone.model, size, alone.model.dtype)
        assert decode.transferred_bytes - before[0].transferred_bytes == formula
        assert decode.recomputed_tokens == before[0].recomputed_tokens and decode.failed_transfers == 0
        assert decode.prompt_tokens == before[0].prompt_tokens  # not one token of a prompt was computed again
        assert prefill.generated_tokens - before[1].generated_tokens == len(plain)
        assert all(one.transferred > 0 and one.recomputed == 0 for one in plain)
        return list(zip(plain, texts, strict=True))

    for request, text in events.run(ask()):
        assert_same(request, text, alone)


@pytest.mark.skipif(nixl_package() is None, reason="nixl is not installed")
def test_pages_travel_by_nixl(directory: Path, alone: Engine) -> None:
    """Also when the engine they come from was killed, and is back."""

    async def ask() -> None:
        async with apart_client(directory, transport="nixl") as loop:
            for turn in range(2):
                requests = [loop.engine.request(f"{turn} {prompt}", greedy(5)) for prompt in PROMPTS[:4]]
                texts = await asyncio.gather(*(text_of(loop, request) for request in requests))
                for request, text in zip(requests, texts, strict=True):
                    assert_same(request, text, alone)
                    assert request.transferred > 0 and request.recomputed == 0
                await all_free(loop)
                prefill = worker_of(loop, "prefill")
                if turn == 0 and prefill.ready is not None:
                    os.kill(prefill.ready.pids[0], signal.SIGKILL)
                    await until(lambda: loop.deaths and worker_of(loop, "prefill").state is State.READY)
            assert (await stats_of(loop, "decode")).failed_transfers == 0

    asyncio.run(ask())


def test_all_kinds_of_requests_at_once(apart: EngineClient, events: asyncio.Runner, alone: Engine) -> None:
    async def ask() -> list[tuple[Request, str]]:
        requests = [apart.engine.request(f"{p} {n}", PARAMS[n % 6]) for n, p in enumerate(PROMPTS * 2)]
        requests += [apart.engine.request("hi", greedy(3)), apart.engine.request(PROMPTS[0], embed=True)]
        texts = await asyncio.gather(*(text_of(apart, request) for request in requests))
        for moment in (0, 1, 2):  # clients that leave: before, between and after
            answers = apart.submit([apart.engine.request(f"the number {moment} " * 9, greedy(400)) for _ in range(3)])
            for _ in range(moment):
                await anext(answers)
            answers.close()
        await all_free(apart)
        return list(zip(requests, texts, strict=True))

    for request, text in events.run(ask()):
        assert_same(request, text, alone)


def test_a_dead_prefill_worker_makes_it_slower_never_wrong(directory: Path, alone: Engine) -> None:
    """Killed before, during and after the transfer; when it is back, it is used again."""

    async def ask() -> None:
        async with apart_client(directory, page_seconds=2.0, lease_seconds=1.0) as loop:
            finished: list[tuple[Request, str]] = []

            async def one(prompt: str) -> Request:
                request = loop.engine.request(prompt, greedy(6))
                finished.append((request, await text_of(loop, request)))
                return request

            assert (await one(PROMPTS[0])).transferred > 0
            for number, moment in enumerate((_idle, _in_prefill, _in_transfer, _in_decode)):
                prefill, deaths = worker_of(loop, "prefill"), loop.deaths
                assert prefill.ready is not None
                request = loop.engine.request(f"{number} " + PROMPTS[number + 1] * 2, greedy(6))
                finished.append((request, await moment(loop, request, prefill.ready.pids[0])))
                await until(lambda: loop.deaths > deaths)  # noqa: B023
                await until(lambda: worker_of(loop, "prefill").state is State.READY)
            again = await one("back " + PROMPTS[5])
            assert again.transferred > 0 and again.recomputed == 0
            decode = await stats_of(loop, "decode")
            assert decode.recomputed_tokens > 0 and decode.failed_transfers == 1
            await all_free(loop)
            for request, text in finished:
                assert_same(request, text, alone)

    asyncio.run(ask())


async def _idle(loop: EngineClient, request: Request, pid: int) -> str:
    os.kill(pid, signal.SIGKILL)
    return await text_of(loop, request)


async def _in_prefill(loop: EngineClient, request: Request, pid: int) -> str:
    task = asyncio.create_task(text_of(loop, request))
    await until(lambda: worker_of(loop, "prefill").open)
    os.kill(pid, signal.SIGKILL)
    return await task


async def _in_transfer(loop: EngineClient, request: Request, pid: int) -> str:
    """It does not answer any more, also not the decode worker that asks for pages."""
    handed = loop.routing.handed

    def stopped(entry: OpenRequest, what: object) -> None:
        os.kill(pid, signal.SIGSTOP)
        handed(entry, what)

    loop.routing.handed = stopped  # type: ignore[method-assign]
    text = await text_of(loop, request)
    loop.routing.handed = handed  # type: ignore[method-assign]
    os.kill(pid, signal.SIGKILL)
    assert request.recomputed == len(request.prompt) and request.transferred == 0
    return text


async def _in_decode(loop: EngineClient, request: Request, pid: int) -> str:
    answers = loop.submit([request])
    text = (await anext(answers)).text + (await anext(answers)).text
    os.kill(pid, signal.SIGKILL)
    text += "".join([output.text async for output in answers])
    answers.close()
    assert request.transferred > 0 and request.recomputed == 0
    return text


def test_a_dead_decode_worker_is_replaced(directory: Path, alone: Engine) -> None:
    async def ask() -> None:
        async with apart_client(directory, page_seconds=2.0, lease_seconds=1.0) as loop:
            decode = worker_of(loop, "decode")
            assert decode.ready is not None
            request = loop.engine.request(PROMPTS[1] * 2, greedy(12))
            answers = loop.submit([request])
            text = (await anext(answers)).text + (await anext(answers)).text
            os.kill(decode.ready.pids[0], signal.SIGKILL)
            text += "".join([output.text async for output in answers])
            answers.close()
            assert_same(request, text, alone)
            await until(lambda: worker_of(loop, "decode").state is State.READY)
            another = loop.engine.request(PROMPTS[2], greedy(5))
            assert_same(another, await text_of(loop, another), alone)
            assert another.transferred > 0
            await all_free(loop)

    asyncio.run(ask())


def test_leases_of_clients_that_left_end(directory: Path) -> None:
    """Between the two workers: the decode worker never hears of the request, and the pages are free all the same."""

    async def ask() -> None:
        async with apart_client(directory, lease_seconds=0.5) as loop:
            request = loop.engine.request(PROMPTS[3], greedy(400))
            answers = loop.submit([request])
            handed, left = loop.routing.handed, []

            def leaves(entry: OpenRequest, what: object) -> None:
                left.append(what)
                loop.routing.handed = handed  # type: ignore[method-assign]
                handed(entry, what)
                asyncio.get_running_loop().call_soon(answers.close)

            loop.routing.handed = leaves  # type: ignore[method-assign]
            loop._dispatch, dispatch = (lambda: None), loop._dispatch  # type: ignore[method-assign]
            await until(lambda: left and not loop.open)
            loop._dispatch = dispatch  # type: ignore[method-assign]
            await all_free(loop)
            assert (await stats_of(loop, "decode")).prompt_tokens == 0

    asyncio.run(ask())


@pytest.mark.parametrize("layouts", [("tp=2", ""), ("", "tp=2")])
def test_unequal_layouts(directory: Path, alone: Engine, layouts: tuple[str, str]) -> None:
    """Two ranks prefill and one decodes, and the other way round: each rank asks for the heads it holds."""

    async def ask() -> None:
        async with apart_client(directory, layouts=layouts) as loop:
            plain = [loop.engine.request(prompt, greedy(4)) for prompt in PROMPTS[:3]]
            finished = [(request, await text_of(loop, request)) for request in plain]
            decode = await stats_of(loop, "decode")
            size, pages = loop.engine.page_pool.size, sum(-(-len(one.prompt) // 16) for one in plain)
            assert decode.transferred_bytes == pages * page_bytes(alone.model, size, alone.model.dtype)
            assert decode.recomputed_tokens == decode.failed_transfers == 0 and decode.prompt_tokens == 0
            assert [one.transferred for one in plain] == [len(one.prompt) for one in plain]
            mixed = [loop.engine.request(f"{p} {n}", PARAMS[n % 6]) for n, p in enumerate(PROMPTS)]
            texts = await asyncio.gather(*(text_of(loop, request) for request in mixed))
            finished += list(zip(mixed, texts, strict=True))
            answers = loop.submit([loop.engine.request(PROMPTS[4] * 2, greedy(400))])
            await anext(answers)
            answers.close()
            await all_free(loop)
            prefill, deaths = worker_of(loop, "prefill"), loop.deaths
            assert prefill.ready is not None
            os.kill(prefill.ready.pids[-1], signal.SIGKILL)  # one rank, and so all of them
            request = loop.engine.request("once more " + PROMPTS[5], greedy(6))
            finished.append((request, await text_of(loop, request)))
            await until(lambda: loop.deaths > deaths)
            await until(lambda: worker_of(loop, "prefill").state is State.READY)
            request = loop.engine.request("and again " + PROMPTS[6], greedy(6))
            finished.append((request, await text_of(loop, request)))
            assert request.transferred > 0 and request.recomputed == 0
            await all_free(loop)
            for request, text in finished:
                assert_same(request, text, alone)

    asyncio.run(ask())


def test_adapters_and_tenants(directory: Path, tmp_path: Path) -> None:
    """Pages of an adapter and of a salt are asked for by names of their own."""
    path = write_adapter(tmp_path / "mine", 1)
    alone = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    alone.load_adapter("mine", path)

    async def ask() -> None:
        async with apart_client(directory, adapters={"mine": str(path)}) as loop:
            found = []
            for adapter, salt in (("mine", ""), (None, ""), ("mine", "a"), ("mine", "b")):
                request = loop.engine.request(PROMPTS[0] * 2, greedy(6), adapter=adapter, salt=salt)
                found.append((request, await text_of(loop, request), adapter))
                assert request.transferred == len(request.prompt) and request.recomputed == request.cached == 0
            same = loop.engine.request(PROMPTS[0] * 2, greedy(6), adapter="mine", salt="a")
            await text_of(loop, same)
            # Its full pages were here.
            assert same.transferred == len(same.prompt) % 16 and same.recomputed == 0 < same.cached
            await all_free(loop)
            for request, text, adapter in found:
                assert_same(request, text, alone, adapter)

    asyncio.run(ask())
