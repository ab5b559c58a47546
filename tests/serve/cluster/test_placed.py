"""Ranks in processes that a launcher has started: torchrun as it is, and Slurm's srun played by this test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from moesaic.cli import main
from moesaic.serve.cluster.engine_process import free_port
from moesaic.serve.core.engine import Engine
from tests.waiting import PATIENCE, until

SERVE = ["--placed-by", "{launcher}", "--port", "0", "--cache-gb", "0.01", "--threads", "1", "--admin-key-env", "ADMIN"]
BODY = {"prompt": "The number 7 is", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def command(launcher: str, directory: Path, *more: str) -> list[str]:
    words = [word.format(launcher=launcher) for word in SERVE]
    return ["-m", "moesaic", "serve", str(directory), *words, *more]


@contextmanager
def started(commands: list[list[str]], environments: list[dict[str, str]], code: int) -> Iterator[str]:
    """The address of the server, which the first of them prints; told to end, all do, with this exit code."""
    processes = [
        subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=os.environ | {"ADMIN": "secret"} | more
        )
        for words, more in zip(commands, environments, strict=True)
    ]
    try:
        assert processes[0].stdout is not None
        url = next(word for line in processes[0].stdout for word in line.split() if word.startswith("http://"))
        yield url
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE) for process in processes] == [code] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check(url: str, alone: Engine, ranks: int) -> None:
    """It answers as one engine does, also after a rank was killed."""
    (wanted,) = alone.generate([BODY["prompt"]], max_tokens=20, temperature=0.0, ignore_eos=True)
    with httpx.Client(base_url=url, timeout=PATIENCE, headers={"authorization": "Bearer secret"}) as client:

        def pids() -> list[int]:
            workers = client.get("/admin/workers").json()["workers"]
            return [rank["pid"] for worker in workers for rank in worker["ranks"] if worker["state"] == "ready"]

        for victim in range(ranks):
            assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == wanted.text
            before = pids()
            assert len(set(before)) == ranks
            killed = before[victim]
            os.kill(killed, signal.SIGKILL)
            until(lambda killed=killed: len(now := pids()) == ranks and killed not in now, every=0.1)
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == wanted.text


def test_torchrun(directory: Path, alone: Engine) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words = [*launcher, *command("torchrun", directory, "--layout", "tp=2")]
    with started([words], [{}], code=1) as url:  # which torchrun has whenever it was told to end
        check(url, alone, 2)


def test_slurm_with_two_workers(directory: Path, alone: Engine) -> None:
    port = str(free_port())
    environments = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(2)
    ]
    with started([command("slurm", directory, "--replicas", "2")] * 2, environments, code=0) as url:
        check(url, alone, 2)


def test_what_is_missing_is_told(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["serve", str(directory), "--placed-by", "torchrun", "--port", "0"]) == 2
    assert "RANK" in (said := capsys.readouterr().err) and "docs/deploy.md" in said
