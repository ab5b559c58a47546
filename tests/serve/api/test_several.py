"""Several models in one server: each request goes to the one it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import moesaic
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running
from tests.serve.made import talking_model

BODY = {"prompt": "7 is a number", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def both(new_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    other = moesaic.load(talking_model(tmp_path_factory.mktemp("other") / "tiny", seed=1), threads=1)
    engine = Engine(other, cache_bytes=16 << 20, seed=0)
    with running(new_engine(), also={"other": engine}, aliases=("gpt-4o",)) as server:
        yield server


def test_a_request_goes_to_the_model_it_names(both: Running) -> None:
    texts = {}
    for name in (NAME, "gpt-4o", "other"):
        answer = both.post("/v1/completions", BODY | {"model": name}).json()
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
    assert texts[NAME] == texts["gpt-4o"] != texts["other"]
    assert both.post("/v1/completions", BODY).json()["choices"][0]["text"] == texts[NAME]
    assert both.post("/v1/completions", BODY | {"model": "third"}).status_code == 404


def test_all_are_listed(both: Running) -> None:
    with both.http() as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert list(cards) == [NAME, "gpt-4o", "other"]
        assert cards["gpt-4o"]["root"] == NAME
        assert client.get("/v1/models/other").json() == cards["other"]
        assert client.get("/v1/models/gpt-4o").json()["parent"] is None
        assert client.get("/v1/models/third").status_code == 404
        assert client.get("/ready").status_code == 200


def test_metrics_are_of_each(both: Running) -> None:
    both.post("/v1/completions", BODY | {"model": "other"})
    with both.http() as client:
        lines = client.get("/metrics").text.splitlines()
    generated = [line for line in lines if line.startswith("moesaic:generation_tokens_total{")]
    assert sorted(line.split('"')[1] for line in generated) == sorted([NAME, "other"])
    assert sum(line.startswith("# TYPE moesaic:generation_tokens_total") for line in lines) == 1
    assert all("model_name=" in line for line in lines if line.startswith("moesaic:") and "energy" not in line)


def test_every_dialect_reaches_every_model(both: Running) -> None:
    tokens = [both.post("/tokenize", {"model": name, "prompt": "yes"}).json()["tokens"] for name in (NAME, "other")]
    assert tokens[0] == tokens[1]
    chat = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 2}
    assert both.post("/v1/chat/completions", chat | {"model": "other"}).json()["model"] == "other"
    message = {"model": "other", "max_tokens": 2, "messages": [{"role": "user", "content": "yes"}]}
    assert both.post("/v1/messages", message).json()["model"] == "other"
    ollama = {"messages": [{"role": "user", "content": "yes"}], "stream": False, "options": {"num_predict": 2}}
    assert both.post("/api/chat", ollama | {"model": "other:latest"}).json()["model"] == "other:latest"
    assert both.post("/api/chat", ollama | {"model": "third"}).status_code == 404
    kept = both.post("/v1/responses", {"model": "other", "input": "yes", "max_output_tokens": 2}).json()
    with both.http() as client:
        assert client.get(f"/v1/responses/{kept['id']}").json()["model"] == "other"
        assert {model["name"] for model in client.get("/api/tags").json()["models"]} >= {"other:latest"}
