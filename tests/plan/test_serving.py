"""The serving estimate: its parts add up, its answers move the right way, and wrong requests are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import Cluster, catalogue, load_cluster, load_device
from moesaic.plan.models import load_model
from moesaic.plan.serving.engines import engines, load_engine
from moesaic.plan.serving.estimate import ServingPlan, estimate_serving
from moesaic.plan.serving.memory import sequence_bytes, weight_bytes
from moesaic.plan.serving.step import Batch, Serving

MODELS = {
    name: load_model(name) for name in ("deepseek-v3", "gpt-oss-120b", "llama-3-70b", "qwen3.5-397b-a17b", "glm-5")
}
SHAPES = st.sampled_from(sorted(MODELS))
DEVICES = st.sampled_from(["h100", "h200", "b200", "mi300x", "a100"])
ENGINES = st.sampled_from(sorted(engines()))
LAYOUTS = st.sampled_from(
    [ParallelLayout(tp=8), ParallelLayout(tp=8, ep=8), ParallelLayout(tp=4), ParallelLayout(dp=8, ep=8),
     ParallelLayout(tp=2, dp=4, ep=8)]
)  # fmt: skip


def plan(
    model: str = "deepseek-v3", device: str = "h200", layout: ParallelLayout | None = None, **given: object
) -> ServingPlan:
    asked = {"prompt": 1024, "output": 512, "concurrency": 32, "dtype": "fp8", "backend": "sglang"} | given
    return estimate_serving(MODELS[model], load_cluster(f"64x{device}"), layout or ParallelLayout(tp=8), **asked)  # type: ignore[arg-type]


def test_output_rate_follows_from_the_latencies() -> None:
    found = plan()
    seconds = (found.ttft_ms + found.tpot_ms * 511) / 1e3
    assert found.output_tokens_per_second == pytest.approx(32 * 512 / seconds)
    assert found.requests_per_second == pytest.approx(32 / seconds)
    assert found.tokens_per_second_per_gpu == pytest.approx(found.output_tokens_per_second / 8)
    assert found.memory_bytes["total"] == pytest.approx(
        sum(found.memory_bytes[part] for part in ("weights", "kv_cache", "buffers"))
    )
    hourly = 8 * load_device("h200").price
    assert found.dollars_per_million_output_tokens == pytest.approx(
        hourly / 3600 / found.output_tokens_per_second * 1e6
    )


def test_one_token_streams_the_weights() -> None:
    """No decode step is faster than reading the active weights at the full bandwidth, nor eight times slower."""
    model = MODELS["llama-3-70b"]
    found = plan("llama-3-70b", layout=ParallelLayout(tp=8), concurrency=1, dtype="bf16")
    least = model.active_parameters * 2 / 8 / load_device("h200").bandwidth
    assert least < found.tpot_ms / 1e3 < 8 * least
    assert plan("llama-3-70b", prompt=8192, dtype="bf16").bounds["prefill"] == "compute"


@settings(deadline=None, max_examples=60)
@given(SHAPES, DEVICES, ENGINES, LAYOUTS, st.integers(1, 600), st.sampled_from([128, 1024, 8192]))
def test_more_hardware_is_never_slower(
    model: str, device: str, engine: str, layout: ParallelLayout, concurrency: int, prompt: int
) -> None:
    base = load_device(device)
    better = {
        "bandwidth": replace(base, bandwidth=base.bandwidth * 1.5),
        "flops": replace(base, flops={name: 1.5 * rate for name, rate in base.flops.items()}),
        "link": replace(base, link=base.link * 2, network=base.network * 2),
        "memory": replace(base, memory_bytes=base.memory_bytes * 2),
    }
    asked = {"prompt": prompt, "output": 256, "concurrency": concurrency, "dtype": "fp8", "backend": engine}
    before = estimate_serving(MODELS[model], Cluster(base, 8), layout, **asked)  # type: ignore[arg-type]
    for what, device_ in better.items():
        after = estimate_serving(MODELS[model], Cluster(device_, 8), layout, **asked)  # type: ignore[arg-type]
        assert after.output_tokens_per_second >= before.output_tokens_per_second * (1 - 1e-9), what


@settings(deadline=None, max_examples=60)
@given(SHAPES, DEVICES, ENGINES, LAYOUTS, st.integers(1, 400), st.integers(1, 8000), st.integers(1, 2000))
def test_steps_grow_with_batch_and_context(
    model: str, device: str, engine: str, layout: ParallelLayout, sequences: int, context: int, more: int
) -> None:
    serving = Serving(MODELS[model], load_device(device), layout, load_engine(engine), "fp8", "bf16")
    base = serving.step(Batch(sequences, context)).seconds
    assert serving.step(Batch(sequences + more, context)).seconds >= base
    assert serving.step(Batch(sequences, context + more)).seconds >= base
    assert serving.step(Batch(sequences, context, more, more / 2)).seconds >= base
    assert sequence_bytes(serving, context + more) >= sequence_bytes(serving, context)


@settings(deadline=None, max_examples=40)
@given(SHAPES, ENGINES, st.integers(1, 500), st.integers(1, 200))
def test_more_clients_wait_longer_but_the_cluster_gives_more(
    model: str, engine: str, concurrency: int, more: int
) -> None:
    few = plan(model, "b200", concurrency=concurrency, backend=engine)
    many = plan(model, "b200", concurrency=concurrency + more, backend=engine)
    assert many.ttft_ms + many.tpot_ms * 511 >= few.ttft_ms + few.tpot_ms * 511
    assert many.output_tokens_per_second >= few.output_tokens_per_second * 0.97


@pytest.mark.parametrize("device", sorted(catalogue()))
@pytest.mark.parametrize("engine", sorted(engines()))
def test_every_device_and_engine_answers(device: str, engine: str) -> None:
    found = estimate_serving(
        MODELS["gpt-oss-120b"], Cluster(load_device(device), 8), ParallelLayout(tp=8),
        prompt=512, output=128, concurrency=4, dtype="fp4", backend=engine,
    )  # fmt: skip
    assert 0 < found.tpot_ms < 1e6 and 0 < found.expected_error < 5


def test_experts_are_divided_over_all_ranks_and_attention_by_tp() -> None:
    model, device, engine = MODELS["deepseek-v3"], load_device("h200"), load_engine("sglang")
    tp = weight_bytes(Serving(model, device, ParallelLayout(tp=8), engine, "fp8", "bf16"))
    dp = weight_bytes(Serving(model, device, ParallelLayout(dp=8, ep=8), engine, "fp8", "bf16"))
    one = weight_bytes(Serving(model, device, ParallelLayout(), engine, "fp8", "bf16"))
    assert one / 8 == pytest.approx(tp, rel=0.01)
    assert tp < dp < 1.5 * tp
    assert one == pytest.approx(model.parameters, rel=0.03)  # a byte each, but for the embedding and the head


def test_a_model_that_does_not_fit_says_so() -> None:
    assert not plan("deepseek-v3", "h100", ParallelLayout(tp=8)).fits
    found = plan("deepseek-v3", "h200", ParallelLayout(tp=8), concurrency=4096)
    assert found.fits and found.sequences_that_fit < 4096
    assert found.batch <= found.sequences_that_fit  # the others wait, which the first token pays for
    assert found.ttft_ms > 10 * plan("deepseek-v3", "h200", concurrency=64).ttft_ms


def test_a_split_is_bound_by_the_slower_side() -> None:
    asked = {
        "layout": ParallelLayout(tp=8),
        "prefill": ParallelLayout(tp=8),
        "prompt": 8192,
        "output": 64,
        "concurrency": 64,
    }
    one, two = plan(**asked, prefill_workers=1), plan(**asked, prefill_workers=4)  # type: ignore[arg-type]
    assert two.output_tokens_per_second > 1.5 * one.output_tokens_per_second
    assert one.devices == 16 and two.devices == 40
    assert one.ttft_ms > two.ttft_ms


def test_stages_and_context_ranks_divide_the_work() -> None:
    """Four stages hold a quarter of the weights and together decode more than one replica that keeps them all."""
    one = plan("llama-3-70b", "h200", ParallelLayout(tp=2), concurrency=256)
    four = plan("llama-3-70b", "h200", ParallelLayout(tp=2, pp=4), concurrency=256)
    assert four.memory_bytes["weights"] < 0.35 * one.memory_bytes["weights"]
    assert one.output_tokens_per_second < four.output_tokens_per_second < 4 * one.output_tokens_per_second
    long = {"prompt": 100_000, "output": 64, "concurrency": 1, "dtype": "bf16"}
    alone = plan("llama-3-70b", "h200", ParallelLayout(tp=2), **long)
    ring = plan("llama-3-70b", "h200", ParallelLayout(tp=2, cp=4), **long)  # in one NVLink domain
    assert alone.ttft_ms / 4 < ring.ttft_ms < alone.ttft_ms / 2
    assert ring.tpot_ms < alone.tpot_ms


def test_a_request_rate_makes_the_concurrency_it_needs() -> None:
    found = plan(request_rate=2.0, concurrency=4096)
    assert found.requests_per_second == pytest.approx(2.0, rel=0.01)
    assert found.concurrency == pytest.approx(2.0 * (found.ttft_ms + found.tpot_ms * 511) / 1e3, rel=0.02)
    busy = plan(request_rate=1e6, concurrency=64)
    assert busy.concurrency == pytest.approx(64, rel=0.01)


def test_a_cached_prefix_shortens_the_first_token_and_speculation_the_others() -> None:
    assert plan(prompt=8192, prefix_share=0.9).ttft_ms < plan(prompt=8192).ttft_ms
    assert plan(tokens_per_step=1.8).tpot_ms < plan().tpot_ms
    assert (
        plan(cache_dtype="fp8", prompt=8192).sequences_that_fit
        > plan(cache_dtype="bf16", prompt=8192).sequences_that_fit
    )


def test_formats_have_several_names() -> None:
    assert plan("gpt-oss-120b", "b200", dtype="mxfp4") == plan("gpt-oss-120b", "b200", dtype="fp4")
    assert plan(cache_dtype="fp8_e4m3") == plan(cache_dtype="fp8")


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"prompt": 0}, "at least 1"),
        ({"concurrency": 0}, "at least 1"),
        ({"dtype": "fp9"}, "unknown number format"),
        ({"cache_dtype": "tiny"}, "unknown number format"),
        ({"backend": "vlm"}, "vllm"),
        ({"prefix_share": 1.5}, "from 0"),
        ({"request_rate": -1.0}, "above 0"),
        ({"layout": ParallelLayout(tp=128)}, "128 devices"),
    ],
)
def test_wrong_requests_are_refused(given_: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan(**given_)  # type: ignore[arg-type]
