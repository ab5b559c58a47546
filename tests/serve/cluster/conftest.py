"""One very small model for all tests of workers, and an engine in this process to compare them with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.core.engine import Engine
from tests.serve.cluster.workers import CACHE, client_of, let
from tests.serve.made import talking_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("workers") / "tiny")


@pytest.fixture(scope="session")
def alone(directory: Path) -> Engine:
    return Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Of the policy `Held`; open at first."""
    let(tmp_path / "gate", 10**6)
    return tmp_path / "gate"


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def two(directory: Path, events: asyncio.Runner) -> Iterator[EngineClient]:
    """Two workers, for all tests that leave them as they are: starting them takes longer than what they are asked."""

    async def begin() -> EngineClient:
        return await client_of(directory, 2).__aenter__()

    loop = events.run(begin())
    yield loop
    events.run(loop.__aexit__())


@pytest.fixture
def loop(two: EngineClient) -> EngineClient:
    """To which every prompt is new, as to workers that have just started."""
    for worker in two.workers:
        worker.prefixes = PrefixIndex()
    return two
