"""docs/deploy.md is true: the commands in it are run as they stand there, at a small size."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import moesaic
from moesaic.serve.cluster.engine_process import free_port
from tests.waiting import PATIENCE

TEXT = (Path(moesaic.__file__).parents[1] / "docs" / "deploy.md").read_text()
# What is made smaller, by the word before it or by itself.
SMALL = {"--nnodes": "1", "--nproc-per-node": "2", "--node-rank": "0", "--port": "0", "--host": "127.0.0.1"}
SMALLER = {"HOST0": "127.0.0.1", "tp=8 ep=16": "tp=2", "/model": "DIR", "4": "2", "auto": "local"}


def blocks() -> list[str]:
    return [block.strip("\n").replace("\\\n", " ") for block in TEXT.split("```")[1::2]]


def commands(start: str) -> list[list[str]]:
    """Of all lines that begin so, their words without comments."""
    lines = [line for block in blocks() for line in block.splitlines() if line.startswith(start)]
    return [shlex.split(line, comments=True) for line in lines]


def small(words: list[str], directory: Path) -> list[str]:
    made: list[str] = []
    for word in words:
        before = made[-1] if made else ""
        word = SMALL.get(before, SMALLER.get(word, word))
        made.append(str(free_port()) if before == "--master-port" else word)
    made = [str(directory) if word == "DIR" else word for word in made]
    return made + ["--threads", "1", "--cache-gb", "0.01"] + ([] if "--port" in made else ["--port", "0"])


@contextmanager
def run(words: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def assert_serves(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.get("/ready").status_code == 200
        body = {"prompt": "The number 7 is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4


SERVE = [words for words in commands("moesaic serve")]


@pytest.mark.parametrize("words", SERVE, ids=" ".join)
def test_on_one_machine_and_on_ray(words: list[str], directory: Path) -> None:
    if "--ray" in words:
        pytest.importorskip("ray")
    with run(["-m", *small(words, directory)]) as process:
        assert_serves(process)


def test_with_torchrun(directory: Path) -> None:
    (words,) = commands("torchrun")
    with run(["-m", "torch.distributed.run", *small(words, directory)[1:]]) as process:
        assert_serves(process)


def test_with_slurm(directory: Path) -> None:
    """Without Slurm: what `srun` would start, with what it would say in the environment."""
    (words,) = commands("srun")
    script = next(block for block in blocks() if "srun" in block)
    assert {"export MASTER_ADDR", "export MASTER_PORT"} <= {line.partition("=")[0] for line in script.splitlines()}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    made = ["-m", *small(words[words.index("moesaic") :], directory)]
    with ExitStack() as stack:
        tasks = [
            stack.enter_context(run(made, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **meeting))
            for rank in range(2)
        ]
        assert_serves(tasks[0])
        # Slurm signals all tasks; the others leave it to the first, and end when that has.
        for task in tasks:
            task.terminate()


def test_in_a_container(directory: Path) -> None:
    """Without Docker: what the container would start."""
    recipe = next(block for block in blocks() if block.startswith("FROM"))
    lines = dict(line.split(" ", 1) for line in recipe.splitlines())
    words = json.loads(lines["ENTRYPOINT"]) + json.loads(lines["CMD"])
    with run(["-m", *small(words, directory)], TRITON_CACHE_DIR="") as process:
        assert_serves(process)


def test_every_call_of_the_table_is_there() -> None:
    source = (Path(moesaic.__file__).parent / "serve" / "api" / "admin.py").read_text()
    named = [
        word.strip("`,") for line in TEXT.splitlines() if line.startswith("| `") for word in line.split("|")[1].split()
    ]
    calls = {word.replace("/2/", "/{number}/") for word in named if word.startswith("/admin")}
    assert len(calls) == 6
    assert all(f'"{call}"' in source for call in calls), calls
