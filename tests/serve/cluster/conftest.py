"""Workers that many tests ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from tests.serve.cluster.workers import client_of, entered, let


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Of the policy `Held`; open at first."""
    let(tmp_path / "gate", 10**6)
    return tmp_path / "gate"


@pytest.fixture(scope="module")
def two(directory: Path, events: asyncio.Runner) -> Iterator[EngineClient]:
    """Two workers, for all tests that leave them as they are: starting them takes longer than what they are asked."""
    yield from entered(events, client_of(directory, 2))


@pytest.fixture
def loop(two: EngineClient) -> EngineClient:
    """To which every prompt is new, as to workers that have just started."""
    for worker in two.workers:
        worker.prefixes = PrefixIndex()
    return two
