"""Metrics have the values of what was done; the live view moves; the engine's thread sleeps when it may."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import moesaic
from moesaic.serve.api.energy import Energy
from moesaic.serve.api.metrics import Histogram
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running
from tests.waiting import PATIENCE

HELLO: Any = {
    "messages": [{"role": "user", "content": "The number 7 is a number, as you like it"}],
    "max_tokens": 10,
    "ignore_eos": True,
}


def metrics(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with server.http() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_count_what_was_done(new_engine: Callable[..., Engine]) -> None:
    with running(new_engine(), metrics_names="vllm") as server:
        used = [server.post("/v1/chat/completions", HELLO).json()["usage"] for _ in range(3)]
        server.post("/v1/embeddings", {"input": "yes"})
        server.until(lambda: server.idle)
        found = metrics(server)

        def value(name: str, **labels: str) -> float:
            for prefix in ("moesaic:", "vllm:"):
                result = found[(prefix + name, tuple(sorted({"model_name": NAME, **labels}.items())))]
            return result

        read = sum(usage["prompt_tokens"] for usage in used)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in used)
        assert value("generation_tokens_total") == 30
        assert value("prefix_cache_hits_total") == cached > 0
        embedded = server.post("/tokenize", {"prompt": "yes"}).json()["count"]
        assert value("prompt_tokens_total") == read + embedded
        computed = found[("moesaic:prompt_tokens_computed_total", (("model_name", NAME),))]
        assert computed == read - cached + embedded
        assert value("time_to_first_token_seconds_count") == 3
        assert value("inter_token_latency_seconds_count") == 27
        assert value("e2e_request_latency_seconds_count") == 4
        assert value("e2e_request_latency_seconds_bucket", le="+Inf") == 4
        assert value("time_to_first_token_seconds_sum") < value("e2e_request_latency_seconds_sum")
        assert value("request_success_total", finished_reason="length") == 3
        assert value("request_success_total", finished_reason="stop") == 1
        assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
        assert value("num_preemptions_total") == value("spec_decode_num_draft_tokens_total") == 0
        assert value("spec_decode_num_accepted_tokens_total") == 0
        computed += 30 - 3  # the last token of an answer is not computed
        for layer in range(3):
            load = [
                found[("moesaic:expert_tokens_total", (("expert", str(e)), ("layer", str(layer))))] for e in range(6)
            ]
            assert sum(load) == 2 * computed
            balance = found[("moesaic:expert_load_max_over_mean", (("layer", str(layer)),))]
            assert balance == pytest.approx(max(load) * 6 / sum(load))


def test_without_the_switch_there_are_only_our_names(server: Running) -> None:
    assert all(name.startswith("moesaic:") for name, _ in metrics(server))


def test_the_live_view_moves(new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.serve.api.metrics.WINDOW", PATIENCE)
    with running(new_engine(), hold=40) as server, server.http() as client:
        before = client.get("/live").json()
        assert (before["running"], before["waiting"], before["cache_share"]) == (0, 0, 0)
        assert before["ttft_seconds"] is None
        assert before["tokens_per_second"] == 0
        assert {layer: sum(counts) for layer, counts in before["experts"].items()} == {"0": 0, "1": 0, "2": 0}
        with client.stream("GET", "/live/stream") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            assert json.loads(next(lines))["running"] == 0
            with client.stream(
                "POST", "/v1/chat/completions", json=HELLO | {"max_tokens": 400, "stream": True, "n": 2}
            ) as answer:
                said = answer.iter_lines()
                next(said)

                def routed(more_than: int) -> dict[str, Any]:
                    """The next event by which so many tokens were routed."""
                    return next(seen for line in lines if sum((seen := json.loads(line))["experts"]["0"]) > more_than)

                first = routed(0)
                server.hold.until(80)
                later = routed(sum(first["experts"]["0"]))
        assert later["running"] == 2
        assert 0 < later["cache_share"] < 1
        assert later["tokens_per_second"] > 0
        assert later["ttft_seconds"] > 0


def test_signs_of_life(server: Running, client: openai.OpenAI) -> None:
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}
        assert http.get("/version").json() == {"version": moesaic.__version__}
        server.service.draining = True
        try:
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
            refused = http.post("/v1/chat/completions", json=HELLO)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
        finally:
            server.service.draining = False


def test_an_engine_with_nothing_to_do_sleeps(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.until(lambda: server.idle)
    steps = []
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: (steps.append(1), step())[1])
    time.sleep(0.3)
    assert not steps
    assert server.post("/v1/chat/completions", HELLO).status_code == 200
    assert len(steps) >= 10


def test_a_histogram_counts_what_is_at_most_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0), counts=[0, 0, 0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.0


def test_energy_goes_on_where_a_counter_begins_again(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the first, not to be counted twice
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "10000000"), ("energy_uj", "9000000")):
        (zone / name).write_text(text + "\n")
    energy = Energy(tmp_path)
    assert energy.read()["package-0"] == 9.0
    (zone / "energy_uj").write_text("500000\n")
    assert energy.read()["package-0"] == 10.5
    (zone / "energy_uj").write_text("not a number")
    assert "package-0" not in energy.read()
