"""MegaScale-Infer: the ping-pong formula against its events, limits, and who wins when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.plan.disaggregation.colocated import plan_colocated, plan_tensor_parallel
from moesaic.plan.disaggregation.decode_parts import (
    DecodePlan,
    Decoding,
    distinct,
    expert_seconds,
    expert_split,
    message_seconds,
)
from moesaic.plan.disaggregation.megascale_infer import (
    compare_decoding,
    layer_seconds,
    micro_batches_needed,
    ping_pong,
    plan_disaggregated,
    search_split,
)
from moesaic.plan.hardware import Cluster, load_device
from moesaic.plan.models import load_model
from moesaic.plan.shape import FfnShape

H800, H20, L40S = load_device("h800"), load_device("h20"), load_device("l40s")
LARGE, SMALL = load_model("qwen3-235b-a22b"), load_model("qwen3-30b-a3b")
seconds = st.floats(1e-5, 1e-3)


def plan(attention: float, experts: float, message: float, count: int) -> DecodePlan:
    return DecodePlan("disaggregated", 1, 1, count, count, attention, experts, message, 1.0, 1.0, 1.0, 1.0, "")


@given(seconds, seconds, seconds, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_formula_agrees_with_the_events(attention: float, experts: float, message: float, count: int) -> None:
    layers = 60
    formula = layers * layer_seconds(attention, experts, message, count)
    events = ping_pong(plan(attention, experts, message, count), layers).makespan
    # Once, at the start, the pipeline fills: at most one round trip and the other micro-batches behind it.
    fill = attention + experts + 2 * message + count * max(attention, experts, message)
    assert formula - fill <= events <= formula + fill
    assert events == pytest.approx(formula, rel=0.05)


@given(seconds, seconds, st.floats(0, 1))
def test_enough_micro_batches_keep_the_longer_side_busy(attention: float, experts: float, share: float) -> None:
    busy = max(attention, experts)
    message = share * busy
    count = micro_batches_needed(busy, message)
    assert 2 <= count <= 4  # as the paper says of links that are fast enough
    assert layer_seconds(attention, experts, message, count) == pytest.approx(count * busy)
    timeline = ping_pong(plan(attention, experts, message, count), 50)
    side = 0 if attention >= experts else 1
    assert timeline.busy()[side, "compute"] / timeline.makespan > 0.93


def test_one_micro_batch_leaves_both_sides_waiting() -> None:
    timeline = ping_pong(plan(1e-4, 1e-4, 2e-5, 1), 40)
    assert timeline.busy()[0, "compute"] / timeline.makespan < 0.45


def test_experts_are_divided_evenly_or_the_fullest_counts() -> None:
    ffn = FfnShape(1536, True, 128, 8)
    assert (expert_split(ffn, 64), expert_split(ffn, 256)) == (1, 2)
    even, uneven = (expert_seconds(ffn, 4096, 4096.0, count, H800, "bf16") for count in (16, 15))
    assert uneven > even * 1.05  # nine experts on the fullest of 15, eight on each of 16
    assert distinct(ffn, 1) == 1.0 and distinct(ffn, 128) == pytest.approx(128 * (1 - (127 / 128) ** 8))
    assert distinct(FfnShape(100), 8) == 1.0


def test_more_bandwidth_never_hurts_and_one_domain_needs_no_network() -> None:
    ffn = LARGE.layers[0].ffn
    slow, fast = (replace(H800, network=rate, name=f"net{rate}") for rate in (25e9, 100e9))
    times = [message_seconds(ffn, 4096, 1000.0, Cluster(one, 16), Cluster(one, 16)) for one in (slow, fast)]
    assert times[0] > 3 * times[1]
    near = [message_seconds(ffn, 4096, 1000.0, Cluster(one, 4), Cluster(one, 4)) for one in (slow, fast)]
    assert near[0] == near[1]


@pytest.mark.parametrize("context", [700, 2000, 8000])
def test_a_large_sparse_model_gains_over_tensor_parallel_nodes(context: int) -> None:
    """The paper's comparison and its size: up to 1.9 times per device."""
    apart = search_split(LARGE, H800, H800, 32, Decoding(context=context, tpot=0.1))
    nodes = plan_tensor_parallel(LARGE, Cluster(H800, 32), Decoding(context=context, tpot=0.1))
    assert apart is not None and nodes is not None
    assert 1.5 < apart.tokens_per_second_per_device / nodes.tokens_per_second_per_device < 2.3
    assert 0 < apart.attention_utilisation <= 1 and 0 < apart.expert_utilisation <= 1
    assert apart.tpot <= 0.1 and apart.devices == 32


def test_a_small_model_does_not() -> None:
    """It fits a device with room to spare: nothing is gained by moving its tokens about."""
    apart = search_split(SMALL, H800, H800, 8, Decoding(context=2000, tpot=0.1))
    together = plan_colocated(SMALL, Cluster(H800, 8), Decoding(context=2000, tpot=0.1))
    nodes = plan_tensor_parallel(SMALL, Cluster(H800, 8), Decoding(context=2000, tpot=0.1))
    assert apart is not None and nodes is not None and together is not None
    assert apart.tokens_per_second < together.tokens_per_second
    assert apart.tokens_per_second < 1.1 * nodes.tokens_per_second


def test_at_low_load_it_does_not_pay() -> None:
    """A batch of 32 on 32 devices: the round trip counts, not the throughput."""
    cluster = Cluster(H800, 32)
    nodes = plan_tensor_parallel(LARGE, cluster, Decoding(context=2000, tpot=1.0, batch=32))
    apart = plan_disaggregated(LARGE, Cluster(H800, 20), Cluster(H800, 12), Decoding(context=2000, tpot=1.0, batch=32))
    assert nodes is not None and apart is not None
    assert apart.tokens_per_second < nodes.tokens_per_second
    many = plan_disaggregated(LARGE, Cluster(H800, 20), Cluster(H800, 12), Decoding(context=2000, tpot=1.0))
    assert many is not None and many.tokens_per_second > 5 * apart.tokens_per_second


def test_a_slow_network_takes_the_gain_away() -> None:
    nodes = plan_tensor_parallel(LARGE, Cluster(H800, 32), Decoding(context=2000, tpot=0.1))
    rates = []
    for network in (5e9, 20e9, 50e9):
        device = replace(H800, network=network, name=f"h800 {network}")
        found = search_split(LARGE, device, device, 32, Decoding(context=2000, tpot=0.1))
        rates.append(found.tokens_per_second if found else 0.0)
    assert nodes is not None
    assert rates[0] < nodes.tokens_per_second < rates[1] < rates[2]


def test_wide_expert_parallelism_with_overlap_is_the_harder_rival() -> None:
    """Not the paper's baseline: on alike devices it keeps the whole memory for caches and hides its messages too."""
    apart = search_split(LARGE, H800, H800, 32, Decoding(context=2000, tpot=0.1))
    wide = plan_colocated(LARGE, Cluster(H800, 32), Decoding(context=2000, tpot=0.1), overlap=True)
    assert apart is not None and wide is not None
    assert apart.tokens_per_second < wide.tokens_per_second
    assert wide.attention_utilisation <= 1


def test_it_beats_wide_expert_parallelism_where_weights_fill_the_memory() -> None:
    """Every device of wide expert parallelism holds all of attention beside its experts: little is left for caches."""
    model = load_model("deepseek-v3")
    apart = search_split(model, H800, H800, 32, Decoding(context=700, tpot=0.15))
    wide = plan_colocated(model, Cluster(H800, 32), Decoding(context=700, tpot=0.15), overlap=True)
    assert apart is not None and wide is not None
    assert apart.tokens_per_second > 1.5 * wide.tokens_per_second


def test_unlike_devices_gain_per_dollar() -> None:
    """Attention where bandwidth is cheap (H20), experts where flops are (L40S), against either alone."""
    model = load_model("mixtral-8x22b")
    mixed = search_split(model, H20, L40S, 64, Decoding(context=730, tpot=0.15), per_dollar=True)
    assert mixed is not None
    for device in (H20, L40S):
        apart = search_split(model, device, device, 64, Decoding(context=730, tpot=0.15), per_dollar=True)
        nodes = plan_tensor_parallel(model, Cluster(device, 64), Decoding(context=730, tpot=0.15))
        assert apart is not None and nodes is not None
        assert mixed.tokens_per_dollar > 1.2 * apart.tokens_per_dollar
        assert mixed.tokens_per_dollar > 1.5 * nodes.tokens_per_dollar
    swapped = search_split(model, L40S, H20, 64, Decoding(context=730, tpot=0.15), per_dollar=True)
    assert swapped is None or swapped.tokens_per_dollar < mixed.tokens_per_dollar


def test_a_dense_model_has_one_way_messages_like_any_other() -> None:
    dense = load_model("llama-3-8b")
    found = plan_disaggregated(dense, Cluster(H800, 4), Cluster(H800, 4), Decoding(context=1000, tpot=1.0, batch=256))
    assert found is not None and 0 < found.expert_utilisation <= 1


def test_what_does_not_fit_is_none_and_nonsense_refused() -> None:
    assert plan_disaggregated(LARGE, Cluster(H800, 1), Cluster(H800, 1), Decoding(context=2000, tpot=1.0)) is None
    assert plan_colocated(LARGE, Cluster(H800, 2), Decoding(context=2000, tpot=1.0)) is None
    assert search_split(LARGE, H800, H800, 32, Decoding(context=2000, tpot=1e-4)) is None
    with pytest.raises(UserError, match="above zero"):
        plan_disaggregated(LARGE, Cluster(H800, 8), Cluster(H800, 0), Decoding(context=2000, tpot=1.0))


def test_layouts_side_by_side() -> None:
    found = compare_decoding(SMALL, Cluster(H800, 8), Decoding(context=2000, tpot=0.1))
    assert list(found) == ["tensor parallel", "expert parallel", "overlapped", "disaggregated"]
    for plan in found.values():
        assert plan is not None and plan.devices == 8 and plan.tpot <= 0.1
        assert plan.tokens_per_second == pytest.approx(plan.batch / plan.tpot)
