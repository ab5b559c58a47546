"""Client libraries that people use, as they are released, in an environment of their own (`.venv-clients`: what some of
them need cannot stand beside what the suite needs). OpenAI's client and lm-eval are used all over tests/serve/api and
tests/evaluate."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic
from moesaic.serve.api.knowledge import Bases
from tests.serve.api.listed_knowledge import ListedKnowledge
from tests.serve.api.running import Running, running
from tests.serve.made import talking_model
from tests.waiting import PATIENCE

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-clients" / "bin" / "python"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Tools and schemas are long in a vocabulary so small."""
    directory = talking_model(tmp_path_factory.mktemp("clients") / "tiny", context=8192)
    engine = moesaic.Engine(moesaic.load(directory, threads=1), cache_bytes=64 << 20, seed=0)
    with running(engine, knowledge=Bases({"kb": ListedKnowledge()})) as found:
        yield found


@pytest.mark.parametrize("script", sorted(HERE.glob("use_*.py")), ids=lambda path: path.stem)
def test_client(script: Path, roomy: Running) -> None:
    assert PYTHON.exists(), "make test installs the client libraries (make clients)"
    command = [str(PYTHON), str(HERE / "run.py"), str(script), roomy.url]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0 and "ok " in found.stdout, found.stdout + found.stderr
