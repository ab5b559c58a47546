"""A prefill worker with a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.serve.cluster.client import EngineClient
from tests.serve.cluster.workers import entered
from tests.serve.pages.apart import apart_client


@pytest.fixture(scope="module")
def apart(directory: Path, events: asyncio.Runner) -> Iterator[EngineClient]:
    yield from entered(events, apart_client(directory))
