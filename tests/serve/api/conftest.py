"""One tiny model, and one server of it, for all tests that need no server of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

import moesaic
from tests.serve.api.running import Running, running
from tests.serve.made import talking_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("talking") / "tiny")


@pytest.fixture(scope="session")
def new_engine(directory: Path) -> Callable[..., moesaic.Engine]:
    model = moesaic.load(directory, threads=1)
    return lambda **options: moesaic.Engine(model, **{"cache_bytes": 16 << 20, "seed": 0} | options)


@pytest.fixture(scope="module")
def server(new_engine: Callable[..., moesaic.Engine]) -> Iterator[Running]:
    with running(new_engine()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()
