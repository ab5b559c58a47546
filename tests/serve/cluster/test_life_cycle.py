"""Workers come and go, and weights change, under a steady load: no request is dropped, no answer is a mixture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import moesaic
from moesaic.serve.api.keys import Keys, _hash
from moesaic.serve.cluster.launch import with_workers
from moesaic.serve.core.engine import Engine
from tests.serve.cluster.over_http import Served, served
from tests.serve.cluster.test_death import signal_to
from tests.serve.cluster.workers import CACHE, Held, let, options
from tests.serve.made import talking_model
from tests.waiting import PATIENCE

ADMIN = Keys(frozenset([_hash("secret")]))
SECRET = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same model."""
    return talking_model(tmp_path_factory.mktemp("newer") / "tiny", seed=1)


def body(number: int) -> dict[str, Any]:
    return {"prompt": f"{number % 5} is a number", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def answers_of(directory: Path) -> list[str]:
    engine = Engine(moesaic.load(directory, threads=1), cache_bytes=CACHE)
    asked = [body(number)["prompt"] for number in range(5)]
    return [one.text for one in engine.generate(asked, max_tokens=12, temperature=0.0, ignore_eos=True)]


@dataclass
class Load:
    """Clients that ask one thing after the other, and what they were told."""

    url: str
    said: list[tuple[int, int, str]] = field(default_factory=list)  # question, status, answer
    ended: bool = False

    def ask(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False) as client:
            while not self.ended:
                answer = client.post("/v1/completions", json=body(number))
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                self.said.append((number % 5, answer.status_code, text))
                number += 3


@contextmanager
def load(server: Served, clients: int = 3) -> Iterator[Load]:
    running = Load(server.url)
    threads = [threading.Thread(target=running.ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running.ended = True
        for thread in threads:
            thread.join(PATIENCE)


def admin(server: Served, path: str, form: dict[str, Any] | None = None) -> httpx.Response:
    with server.http(headers=SECRET) as client:
        return client.get(path) if form is None else client.post(path, json=form)


def change(server: Served, path: str, form: dict[str, Any]) -> dict[str, Any]:
    """Ask for a change, and wait until it is over."""
    begun = admin(server, path, form)
    assert begun.status_code == 202, begun.text
    while True:
        found: dict[str, Any] = admin(server, "/admin/workers").json()
        if found["change"]["state"] != "running":
            return found


def some_more(running: Load, server: Served, count: int = 6) -> None:
    before = len(running.said)
    server.until(lambda: len(running.said) >= before + count)


def states(found: dict[str, Any]) -> list[str]:
    return [worker["state"] for worker in found["workers"]]


@pytest.mark.parametrize("count", [1, 2])
def test_new_weights_under_load(directory: Path, newer: Path, count: int) -> None:
    old, new = answers_of(directory), answers_of(newer)
    assert not set(old) & set(new)
    with served(with_workers([options(directory)] * count), admin_keys=ADMIN) as server, load(server) as running:
        some_more(running, server)
        found = change(server, "/admin/weights", {"directory": str(newer)})
        assert found["change"]["state"] == "done", found
        assert states(found) == ["ready"] * count
        assert {worker["directory"] for worker in found["workers"]} == {str(newer)}
        done = len(running.said)
        some_more(running, server, 9)
        running.ended = True
    assert all(status == 200 for _, status, _ in running.said)
    assert all(text in (old[number], new[number]) for number, _, text in running.said)
    assert {text for _, _, text in running.said} & set(old) and {text for _, _, text in running.said} & set(new)
    assert all(text == new[number] for number, _, text in running.said[done + 3 :])


def test_a_request_keeps_its_weights_even_if_its_worker_dies_meanwhile(
    directory: Path, newer: Path, gate: Path
) -> None:
    old, new = answers_of(directory), answers_of(newer)
    wanted = options(directory, policy=Held(gate=gate))
    with served(with_workers([wanted]), admin_keys=ADMIN) as server:
        let(gate, 4)
        said: list[str] = []

        def ask() -> None:
            with server.http() as client:
                said.append(client.post("/v1/completions", json=body(0)).json()["choices"][0]["text"])

        first = threading.Thread(target=ask)
        first.start()
        (before,) = server.loop.workers
        server.until(lambda: any(entry.request.written == 4 for entry in list(before.open.values())))
        assert admin(server, "/admin/weights", {"directory": str(newer)}).status_code == 202
        server.until(lambda: before.leaving)
        assert admin(server, "/admin/scale", {"workers": 2}).status_code == 409  # one change at a time
        signal_to(before, 9)
        server.until(lambda: server.loop.deaths == 1)
        let(gate, 100)
        first.join(PATIENCE)
        server.until(lambda: before not in server.loop.workers)
        assert said == [old[0]]
        ask()
        assert said[1] == new[0]


def test_weights_that_cannot_be_served_change_nothing(directory: Path, newer: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in newer.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    other = talking_model(tmp_path / "other", context=256)
    with served(with_workers([options(directory)] * 2), admin_keys=ADMIN) as server, load(server) as running:
        for wrong in (other, tmp_path / "nothing", tmp_path):
            refused = admin(server, "/admin/weights", {"directory": str(wrong)})
            assert refused.status_code == 400, refused.text
        (weights,) = broken.glob("*.safetensors")
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        answer = admin(server, "/admin/weights", {"directory": str(broken)})
        if answer.status_code == 202:
            server.until(lambda: admin(server, "/admin/workers").json()["change"]["state"] == "failed")
        some_more(running, server)
        found = admin(server, "/admin/workers").json()
        assert states(found) == ["ready"] * 2
        assert {worker["directory"] for worker in found["workers"]} == {str(directory)}
    old = answers_of(directory)
    assert all((status, text) == (200, old[number]) for number, status, text in running.said)


def test_scaled_up_and_down_and_drained_under_load(directory: Path) -> None:
    with served(with_workers([options(directory)]), admin_keys=ADMIN) as server, load(server) as running:
        some_more(running, server)
        found = change(server, "/admin/scale", {"workers": 3})
        assert states(found) == ["ready"] * 3
        assert server.service.engine.scheduler.max_requests == 3 * 64
        some_more(running, server)
        found = change(server, "/admin/workers/1/drain", {})
        assert [worker["worker"] for worker in found["workers"]] == [0, 2]
        some_more(running, server)
        found = change(server, "/admin/scale", {"workers": 1})
        assert states(found) == ["ready"] and server.service.engine.scheduler.max_requests == 64
        some_more(running, server)
        last = change(server, f"/admin/workers/{found['workers'][0]['worker']}/drain", {})
        assert last["change"]["state"] == "failed" and "last one" in last["change"]["problem"]
    old = answers_of(directory)
    assert all((status, text) == (200, old[number]) for number, status, text in running.said)


def test_what_does_not_finish_in_time_goes_on_elsewhere(directory: Path, gate: Path) -> None:
    wanted = options(directory, policy=Held(gate=gate))
    with served(with_workers([wanted] * 2), admin_keys=ADMIN, drain_seconds=0.0) as server:
        let(gate, 4)
        with load(server) as running:
            server.until(lambda: all(worker.open for worker in server.loop.workers))
            found = change(server, "/admin/scale", {"workers": 1})
            assert states(found) == ["ready"] and found["workers"][0]["open_requests"] == 3
            let(gate, 100)
            some_more(running, server)
    old = answers_of(directory)
    assert all((status, text) == (200, old[number]) for number, status, text in running.said)


def test_a_server_that_drains_finishes_what_is_open(directory: Path) -> None:
    with served(with_workers([options(directory)]), admin_keys=ADMIN) as server, server.http() as client:
        assert client.post("/admin/drain", json={}).status_code == 401
        assert client.get("/admin/workers").status_code == 401
        assert client.post("/v1/completions", json=body(1)).status_code == 200  # which needs no key here
        assert admin(server, "/admin/drain", {}).status_code == 200
        refused = client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert client.post("/v1/completions", json=body(1)).status_code == 503
        assert client.get("/health").status_code == 200
        assert admin(server, "/admin/resume", {}).status_code == 200
        assert client.get("/ready").status_code == client.post("/v1/completions", json=body(1)).status_code == 200


def test_metrics_of_all_workers_and_ranks(directory: Path) -> None:
    launched = with_workers([options(directory), options(directory, layout="tp=2")])
    with served(launched) as server, server.http() as client:
        for number in range(4):
            assert client.post("/v1/completions", json=body(number)).status_code == 200
        server.run(server.loop.read_stats())
        text = client.get("/metrics").text
        found = {
            (sample.name, tuple(sample.labels.get(label) for label in ("worker", "rank"))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert [found["moesaic:worker_up", (str(number), None)] for number in range(2)] == [1.0, 1.0]
        each = [found["moesaic:worker_generation_tokens_total", (str(number), None)] for number in range(2)]
        assert sum(each) == 48 and found["moesaic:generation_tokens_total", (None, None)] == 48
        one, *two = (found["moesaic:rank_weight_bytes", place] for place in (("0", "0"), ("1", "0"), ("1", "1")))
        assert all(0.4 * one < part < 0.7 * one for part in two)
        assert found["moesaic:rank_sent_bytes_total", ("1", "1")] > 0
        assert found["moesaic:requests_resumed_total", (None, None)] == 0
        assert client.get("/admin/workers").status_code == 404
