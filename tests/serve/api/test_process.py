"""`moesaic serve` as a process: what it prints, how it ends, and what it refuses to begin."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.serve.api.server import listen, serve
from moesaic.serve.api.service import Settings
from moesaic.serve.core.engine import Engine
from tests.waiting import PATIENCE

LONG: Any = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 450, "ignore_eos": True, "temperature": 0}


@contextmanager
def process(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "moesaic", "serve", str(directory), "--port", "0", "--cache-gb", "0.02", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        assert line.startswith("moesaic: tiny at http://127.0.0.1:"), started.stderr and started.stderr.read()
        yield started, line.split()[-1]
    finally:
        started.kill()
        started.communicate()


def test_told_to_stop_it_finishes_what_it_began(directory: Path) -> None:
    with process(directory) as (server, url), httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.get("/ready").status_code == 200
        said: list[str] = []
        began = threading.Event()

        def talk() -> None:
            body = LONG | {"stream": True, "n": 32}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    said.append(line)
                    if len(said) > 100:
                        began.set()

        talker = threading.Thread(target=talk)
        talker.start()
        assert began.wait(PATIENCE)
        server.send_signal(signal.SIGTERM)
        seen = set()
        try:
            while talker.is_alive():
                seen.add(client.get("/ready").status_code)
        except httpx.TransportError:
            pass  # it has gone
        talker.join(PATIENCE)
        assert 503 in seen
        assert said[-2] == "data: [DONE]"
        assert sum('"finish_reason": "length"' in line for line in said) == 32
        assert server.wait(PATIENCE) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""


def test_told_twice_it_goes_at_once(directory: Path) -> None:
    with process(directory, "--drain-seconds", "60") as (server, url):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG | {"stream": True, "n": 120}) as answer:
            said = answer.iter_lines()
            next(said)
            server.send_signal(signal.SIGINT)
            while httpx.get(f"{url}/ready").status_code == 200:
                pass
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
            assert server.stderr is not None
            assert server.stderr.read() == ""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["serve", *words])
    return code, capsys.readouterr().err


def test_a_wrong_beginning_is_told_in_a_line(
    directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = run(capsys, str(directory), "--port", str(taken.getsockname()[1]))
        assert code == 2
        assert "address already in use" in said
        assert "--port" in said
    for words, expected in (
        ([str(tmp_path / "nothing")], "nothing"),
        ([str(directory), "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        ([str(directory), "--port", "70000"], "port"),
        ([str(directory), "--host", "300.1.1.1"], "--host"),
        ([str(directory), "--policy", "fifo"], "fifo"),
        ([str(directory), "--policy", "chunked", "tokens=none"], "tokens"),
        ([str(directory), "--policy", "chunked", "tokns=5"], "tokns"),
        ([str(directory), "tokens=5"], "tokens"),
        ([str(directory), "--policy", "chunked", "policy.tokens=0"], "tokens"),
        ([str(directory), "word"], "word"),
        ([str(directory), "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        ([str(directory), "--api-key-file", str(tmp_path / "none")], "none"),
        ([str(directory), "--cache-gb", "-1"], "--cache-gb"),
        ([str(directory), "--cache-gb", "1e-9"], "cache"),
        ([str(directory), "--metrics-names", "other"], "--metrics-names"),
        ([str(directory), "--adapter", "mine"], "--adapter"),
        ([str(directory), "--adapter", f"mine={tmp_path}"], "adapter"),
        ([str(directory), "--adapter", f"{directory.name}={tmp_path}"], "of the model"),
        ([str(directory), "--adapter", "mine=a", "--adapter", "mine=b"], "another adapter"),
    ):
        code, said = run(capsys, *words, *([] if "--port" in words else ["--port", "0"]))
        assert code == 2, (words, said)
        assert expected in said
        assert len(said.splitlines()) <= 2


def test_a_port_that_another_took_meanwhile_is_told_too(new_engine: Callable[..., Engine]) -> None:
    other = listen("127.0.0.1", 0)
    with other, listen("127.0.0.1", other.getsockname()[1]) as mine:
        other.listen()
        said: list[object] = []
        with pytest.raises(UserError, match=r"address already in use.*--port"):
            asyncio.run(serve(new_engine(), Settings("tiny"), mine, ready=lambda *facts: said.append(facts)))
        assert not said


def test_methods_and_names_are_taken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    async def serve(engine: Any, settings: Any, *rest: Any, **more: Any) -> None:
        made.extend((engine, settings, more))

    monkeypatch.setattr("moesaic.serve.api.server.serve", serve)
    words = ["--policy", "chunked", "tokens=77", "--drafter", "suffix", "--name", "mine", "--max-requests", "3"]
    words += ["--response-store-mb", "0.5", "--response-store-hours", "2"]
    words += ["--max-queue", "5", "--port", "0", "--request-seconds", "0", "--metrics-names", "vllm", "--parser", "glm"]
    assert main(["serve", str(directory), *words]) == 0
    engine, settings, more = made
    assert engine.scheduler.policy.tokens == 77
    assert "Suffix(" in repr(engine.drafter)
    assert engine.scheduler.max_requests == 3
    assert (settings.name, settings.max_queue, settings.request_seconds) == ("mine", 5, None)
    assert (settings.response_bytes, settings.response_seconds) == (1 << 19, 7200.0)
    assert settings.metrics_names == "vllm"
    assert type(settings.parser).__name__ == "Glm"
