"""One very small model for all tests of workers, and an engine in this process to compare them with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic
from moesaic.serve.core.engine import Engine
from tests.serve.cluster.workers import CACHE
from tests.serve.made import talking_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("workers") / "tiny")


@pytest.fixture(scope="session")
def alone(directory: Path) -> Engine:
    return Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner
