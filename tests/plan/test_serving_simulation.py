"""Serving as discrete events: nothing is lost, queues behave as theory says, and the closed estimate agrees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import load_cluster, load_device
from moesaic.plan.models import load_model
from moesaic.plan.serving.engines import load_engine
from moesaic.plan.serving.estimate import estimate_serving
from moesaic.plan.serving.simulate import Arrival, poisson, simulate_serving
from moesaic.plan.serving.step import Batch, Serving

LLAMA = load_model("llama-3-8b")
OSS = load_model("gpt-oss-120b")


def way(model: object = LLAMA, engine: str = "sglang", layout: ParallelLayout | None = None) -> Serving:
    dtype = "fp4" if model is OSS else "fp8"
    return Serving(model, load_device("h200"), layout or ParallelLayout(), load_engine(engine), dtype, "bf16")  # type: ignore[arg-type]


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    serving = way()
    done = simulate_serving(serving, [Arrival(3.0, 1000, 2)])
    (request,) = done.requests
    assert request.ttft == pytest.approx(serving.step(Batch(0, 0, 1000, 500)).seconds)
    assert request.tpot == pytest.approx(serving.step(Batch(1, 1001)).seconds)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9000), st.integers(1, 60)), min_size=1, max_size=30),
    st.sampled_from(["sglang", "vllm"]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 8)),
)
def test_every_request_is_answered_once_and_in_order(
    loads: list[tuple[float, int, int]], engine: str, split: bool, clients: int | None
) -> None:
    serving = way(engine=engine)
    arrivals = [Arrival(*load) for load in loads]
    done = simulate_serving(serving, arrivals, clients=clients, workers=2, prefill=serving if split else None)
    assert len(done.requests) == len(arrivals)
    assert sorted(one.arrival.output for one in done.requests) == sorted(one.output for one in arrivals)
    for request in done.requests:
        assert request.arrival.second < request.first
        assert request.made == request.arrival.output
        if request.arrival.output > 1:
            assert request.finished >= request.first - 1.0  # a hand-over may outlast the first step


@pytest.mark.parametrize(("clients", "prompt"), [(1, 1024), (16, 1024), (64, 4096)])
def test_the_closed_estimate_agrees(clients: int, prompt: int) -> None:
    for model, dtype in ((LLAMA, "fp8"), (OSS, "fp4")):
        serving = way(model)
        done = simulate_serving(serving, poisson(1.0, clients * 6, prompt, 256, seed=1, spread=0.1), clients=clients)
        plan = estimate_serving(
            model, load_cluster("H200"), ParallelLayout(), prompt=prompt, output=256, concurrency=clients, dtype=dtype,
            cache_dtype="bf16", backend="sglang",
        )  # fmt: skip
        assert done.output_tokens_per_second == pytest.approx(plan.output_tokens_per_second, rel=0.2)


def test_a_queue_grows_beyond_what_the_device_serves() -> None:
    serving = way()
    light = simulate_serving(serving, poisson(2.0, 200, 1024, 64, seed=0))
    heavy = simulate_serving(serving, poisson(60.0, 600, 1024, 64, seed=0))
    assert heavy.percentile("ttft", 0.9) > 5 * light.percentile("ttft", 0.9)
    assert light.attainment(ttft_ms=500, tpot_ms=50) > 0.95 > heavy.attainment(ttft_ms=500, tpot_ms=50)
    assert light.output_tokens_per_second == pytest.approx(2.0 * 64, rel=0.2)


def test_a_split_keeps_decode_free_of_prefill() -> None:
    together = simulate_serving(way(), poisson(6.0, 200, 4096, 128, seed=0), workers=2)
    split = simulate_serving(way(), poisson(6.0, 200, 4096, 128, seed=0), prefill=way())
    assert split.percentile("tpot", 0.99) < together.percentile("tpot", 0.99)


def test_small_chunks_let_others_decode() -> None:
    """A long prompt holds up a sequence that decodes for one chunk at a time, and takes longer itself."""
    load = [Arrival(0.0, 16, 8), Arrival(0.001, 30000, 2)]
    long = simulate_serving(way(engine="vllm"), load, chunk=32768)
    short = simulate_serving(way(engine="vllm"), load, chunk=2048)
    assert short.requests[0].finished < long.requests[0].finished / 2
    assert short.requests[1].ttft > long.requests[1].ttft  # each chunk reads the weights again


def test_a_load_without_requests_is_refused() -> None:
    with pytest.raises(UserError, match="no request"):
        simulate_serving(way(), [])
    with pytest.raises(UserError, match="no load"):
        poisson(0.0, 5, 10, 10, seed=0)
