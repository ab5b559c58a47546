"""The load generator tells what a server did: a real one, a failing one, and answers whose numbers are known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.serve.bench.load import LoadRequest, RequestResult, Target, poisson, read_trace, report, send_all
from tests.serve.api.running import running
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    model = moesaic.load(talking_model(tmp_path_factory.mktemp("load") / "tiny"), threads=1)
    with running(moesaic.Engine(model, cache_bytes=16 << 20, seed=0)) as found:
        yield found


class Failing(BaseHTTPRequestHandler):
    """Names a model; then refuses, breaks off or reports an error, by the prompt's first word."""

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        form = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match form["messages"][0]["content"].split()[0]:
            case "refuse":
                self._answer(429, '{"error": {"message": "too many at once"}}')
            case "break":
                self._answer(200, 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
            case "nothing":
                self._answer(200, 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
            case "error":
                self._answer(200, 'data: {"error": {"message": "a replica died"}}\n\n')
            case _:
                pieces = ['data: {"choices": [{"delta": {"content": "a"}}]}\n\n'] * 3
                self._answer(200, "".join(pieces) + "data: [DONE]\n\n")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def failing() -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    thread.join()
    found.server_close()


def test_poisson_arrivals_have_the_rate_and_spread_of_their_process():
    requests = poisson(4000, rate=8.0, words=20, max_tokens=3)
    gaps = np.diff([0.0] + [request.at for request in requests])
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 8, rel=0.1)  # of an exponential: as large as the mean
    lengths = [len(request.prompt.split()) for request in requests]
    assert (min(lengths), max(lengths)) == (10, 30)
    assert poisson(5, 8.0, 20, 3) == poisson(5, 8.0, 20, 3) != poisson(5, 8.0, 20, 3, seed=1)


def test_a_trace_is_read_in_order_and_at_its_speed(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 4, "prompt": "later", "max_tokens": 2}\n\n{"at": 1, "prompt_words": 7}\n')
    first, second = read_trace(file, speed=2.0)
    assert (first.at, len(first.prompt.split()), first.max_tokens) == (0.5, 7, 16)
    assert second == LoadRequest(2.0, "later", 2)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": "no time"}', '{"at": "soon", "prompt": "a"}', '{"at": 1}', "1"]
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 0, "prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"trace.jsonl:2: is not a request"):
        read_trace(file)


def test_the_report_counts_what_was_told():
    requests = [LoadRequest(float(i), "a", 5) for i in range(4)]
    answers = [
        RequestResult(ttft=0.5, inter_token=[0.1] * 4, latency=0.9, prompt_tokens=10, tokens=5),
        RequestResult(ttft=2.0, inter_token=[0.1] * 4, latency=2.4, prompt_tokens=10, tokens=5),  # too late
        RequestResult(ttft=0.5, inter_token=[0.5] * 4, latency=2.5, prompt_tokens=10, tokens=5),  # too slow
        RequestResult(problem="HTTP 429", latency=0.1),
    ]
    found = report(requests, answers, Target(1.0, 0.2))
    assert (found["failed"], found["problems"]) == (1, {"HTTP 429": 1})
    assert found["seconds"] == 4.5
    assert found["tokens_per_second"] == pytest.approx(15 / 4.5)
    assert found["goodput"]["share"] == 0.25 and found["goodput"]["requests_per_second"] == pytest.approx(1 / 4.5)
    assert found["first_token_seconds"]["p90"] == pytest.approx(np.percentile([0.5, 2.0, 0.5], 90))
    assert found["inter_token_seconds"]["max"] == 0.5


def test_every_request_to_a_real_server_is_answered_and_counted(server):
    requests = poisson(20, rate=100.0, words=12, max_tokens=6)
    answers = asyncio.run(send_all(server.url, requests))
    assert [result.problem for result in answers] == [None] * 20
    assert all(result.ttft is not None and 0 < result.ttft <= result.latency for result in answers)
    assert sum(result.tokens for result in answers) == server.engine.counts.generated_tokens
    assert all(result.prompt_tokens > 12 / 2 for result in answers)
    server.until(lambda: server.idle)


def test_refusals_and_broken_answers_are_failures(failing: str):
    requests = [LoadRequest(0.0, word, 4) for word in ("refuse", "break", "error", "fine", "nothing")]
    refused, broken, error, fine, nothing = asyncio.run(send_all(failing, requests))
    assert refused.problem == "HTTP 429" and refused.message == "too many at once"
    assert report(requests, [refused, broken], Target())["said"] == {"HTTP 429": "too many at once"}
    assert broken.problem == "the stream broke off"
    assert "a replica died" in str(error.problem)
    assert fine.problem is None and fine.tokens == 3  # which this server does not count
    assert nothing.problem is None and nothing.ttft is not None  # its first token ended it


def test_the_command_reports_as_json(server, capsys):
    arguments = ["--requests", "5", "--rate", "50", "--words", "8", "--max-tokens", "4", "--json"]
    assert main(["bench", "serve", f"{server.url}/v1", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["failed"]) == (5, 0)
    assert set(found["first_token_seconds"]) == {"mean", "p50", "p90", "p95", "p99", "max"}


def test_a_server_that_is_not_there_is_said_to_be_missing(capsys, tmp_path: Path):
    assert main(["bench", "serve", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert "Is a server there?" in capsys.readouterr().err
    assert main(["bench", "serve", str(tmp_path / "nothing"), "--requests", "1"]) == 2
    assert "neither a URL nor a model directory" in capsys.readouterr().err


def test_a_model_directory_is_served_meanwhile(tmp_path: Path, capsys):
    directory = talking_model(tmp_path / "tiny")
    arguments = ["--requests", "3", "--rate", "50", "--words", "8", "--max-tokens", "4"]
    assert main(["bench", "serve", str(directory), *arguments]) == 0
    assert "3 requests in" in (said := capsys.readouterr().out) and "0 failed" in said and "goodput" in said
