"""Workers for tests: real processes of a very small model, which stand still where a test wants to do something."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.launch import with_workers
from moesaic.serve.cluster.messages import EngineOptions
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies import Plan
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.waiting import PATIENCE

CACHE = 4 << 20


@dataclass(frozen=True)
class Held(Chunked):
    """No request gets more tokens than the number in a file says, in whichever process it is."""

    gate: Path = Path()

    def choose(self, requests: Sequence[Request], stopped: Sequence[ForwardPass], now: float) -> Plan | ForwardPass:
        allowed = int(self.gate.read_text())
        return super().choose([request for request in requests if request.written < allowed], stopped, now)


def let(gate: Path, tokens: int) -> None:
    """Another file in its place: it is never half written."""
    new = gate.with_suffix(".new")
    new.write_text(str(tokens))
    new.replace(gate)


def options(directory: Path, **changed: Any) -> EngineOptions:
    engine = {"cache_bytes": CACHE, "max_requests": 64}
    own = {name: changed.pop(name) for name in ("layout", "stall_seconds", "role") if name in changed}
    return EngineOptions(directory, {"threads": 1}, engine | changed, **own)


def client_of(directory: Path, count: int = 1, adapters: dict[str, str] | None = None, **changed: Any) -> EngineClient:
    frontend, make = with_workers([options(directory, **changed)] * count, adapters=adapters)
    made: EngineClient = make(frontend)
    return made


def entered(events: asyncio.Runner, client: EngineClient) -> Iterator[EngineClient]:
    """A client with its workers running, for a fixture."""
    loop = events.run(client.__aenter__())
    yield loop
    events.run(loop.__aexit__())


async def text_of(loop: EngineClient, request: Request) -> str:
    answers = loop.submit([request])
    try:
        return "".join([output.text async for output in answers])
    finally:
        answers.close()


async def all_free(loop: EngineClient) -> None:
    """Nothing of any request is left, at the front or in a worker."""
    await asyncio.wait_for(loop.until_idle(), PATIENCE)
    await loop.read_stats()
    while any(worker.stats.pages_in_use or worker.stats.running for worker in loop.workers):
        await loop.read_stats()
    assert not loop.open and not loop._visits and not loop._waiting and not loop.engine.scheduler.requests
    assert all(not worker.pending_tokens and not worker.open for worker in loop.workers)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def expected(alone: Engine, request: Request, adapter: str | None = None) -> tuple[Request, str]:
    """The same request, served by one engine that nothing happens to."""
    wanted = alone.request(request.prompt, request.sampling, adapter=adapter, embed=request.embed)
    wanted.seed = request.seed
    alone.add(wanted)
    pieces = []
    while wanted.finish_reason is None:
        pieces += [output.text for output in alone.step()]
    return wanted, "".join(pieces)


def assert_same(request: Request, text: str, alone: Engine, adapter: str | None = None) -> None:
    """To the bit."""
    wanted, said = expected(alone, request, adapter)
    assert (request.tokens, text, request.finish_reason) == (wanted.tokens, said, wanted.finish_reason)
    assert request.logprobs == wanted.logprobs
    assert request.prompt_logprobs == wanted.prompt_logprobs
    assert request.versions == wanted.versions
    assert request.routes.keys() == wanted.routes.keys()
    for layer, rows in wanted.routes.items():
        assert [row for part in request.routes[layer] for row in part.tolist()] == [
            row for part in rows for row in part.tolist()
        ]
    assert (request.hidden_D is None) == (wanted.hidden_D is None)
    if request.hidden_D is not None and wanted.hidden_D is not None:
        assert request.hidden_D.tolist() == wanted.hidden_D.tolist()
