"""One very small model, an engine in this process to compare with, and a prefill worker with a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic
from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.core.engine import Engine
from tests.serve.cluster.workers import CACHE
from tests.serve.made import talking_model
from tests.serve.pages.apart import apart_client


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("pages") / "tiny")


@pytest.fixture(scope="session")
def alone(directory: Path) -> Engine:
    return Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def apart(directory: Path, events: asyncio.Runner) -> Iterator[EngineClient]:
    async def begin() -> EngineClient:
        return await apart_client(directory).__aenter__()

    loop = events.run(begin())
    yield loop
    events.run(loop.__aexit__())
