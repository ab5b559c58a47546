"""Some hundreds of hostile requests, made from the OpenAPI document: `python -m bench.hostile` sends ten thousand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.hostile import Answer, Neighbour, Run, wrong
from bench.hostile_dialects import with_dialects
from bench.hostile_requests import Case, Cases
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import running
from tests.waiting import PATIENCE


def test_nothing_breaks_hangs_or_leaks(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), max_queue=64, body_seconds=3.0) as server:
        with server.http() as client:
            cases = Cases(with_dialects(client.get("/openapi.json").json()), seed=5)
        run = Run(server.url, cases, PATIENCE)

        async def attack() -> Neighbour:
            neighbour = Neighbour(server.url)
            neighbour.alone = await neighbour.ask()
            beside = asyncio.create_task(neighbour.run())
            await run.run(300, at_once=8, flood=0)
            neighbour.ended = True
            await beside
            return neighbour

        neighbour = asyncio.run(attack())
        assert run.faults == []
        assert run.sent == 300
        assert len(run.kinds) == len(cases.kinds)
        assert neighbour.same
        assert not neighbour.other
    # `running` sees to it that no request, page or task is left


def test_the_same_seed_makes_the_same_requests(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine()) as server, server.http() as client:
        document = client.get("/openapi.json").json()
    made = [[Cases(document, seed).make() for _ in range(20)] for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    ("path", "status", "body", "problem"),
    [
        ("/v1/completions", 500, b"{}", "status 500"),
        ("/v1/completions", 400, b"no", "not JSON"),
        ("/v1/completions", 400, b'{"detail": "x"}', "form"),
        ("/v1/completions", 400, b'{"error": {"message": "x", "type": "y"}}', ""),
        ("/v1/messages", 400, b'{"error": {"message": "x", "type": "y"}}', "form"),
        ("/v1/messages", 400, b'{"type": "error", "error": {"message": "x", "type": "y"}}', ""),
        ("/api/chat", 400, b'{"error": {"message": "x", "type": "y"}}', "form"),
        ("/api/chat", 400, b'{"error": "x"}', ""),
        ("/api/chat", 503, b'{"error": "x"}', ""),
    ],
)
def test_what_counts_as_a_fault(path: str, status: int, body: bytes, problem: str) -> None:
    headers = {"content-type": "application/json", "x-request-id": "a"}
    found = wrong(Answer(status, headers, body), Case("by schema", path, []), path)
    assert problem in found
    assert bool(found) == bool(problem)
