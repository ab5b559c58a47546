"""How many ranks attend and how many hold experts: what fits, what balances, and that it is the engine's own way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.plan.disaggregation.decode_parts import Decoding
from moesaic.plan.disaggregation.group_sizes import (
    _plans,
    attention_rank_bytes,
    expert_rank_bytes,
    serving_sizes,
)
from moesaic.plan.disaggregation.megascale_infer import layer_seconds
from moesaic.plan.hardware import FORMAT_BYTES, load_device
from moesaic.plan.models import load_model

H200 = load_device("h200")
GLM, AIR, MIXTRAL = load_model("glm-4.5"), load_model("glm-4.5-air"), load_model("mixtral-8x7b")
ASKED = Decoding(context=2048, tpot=0.1)


@pytest.mark.parametrize("model, devices", [(GLM, 16), (AIR, 8), (MIXTRAL, 4)])
def test_the_proposal_is_the_best_that_fits(model, devices) -> None:
    best = serving_sizes(model, H200, devices, ASKED)
    assert best is not None and best.devices == devices and best.tpot <= ASKED.tpot
    assert model.layers[0].attention.heads % best.attention == 0
    others = [plan for count in range(1, devices) for plan in _plans(model, H200, count, devices - count, ASKED)]
    assert max(plan.tokens_per_second for plan in others if plan.tpot <= ASKED.tpot) == best.tokens_per_second
    assert attention_rank_bytes(model, best.attention, "bf16") < H200.memory_bytes
    assert expert_rank_bytes(model, best.experts, "bf16") < H200.memory_bytes


def test_ranks_hold_all_weights_between_them() -> None:
    """What is on attention ranks and on expert ranks is the model, routers and only they being on each."""
    for model in (GLM, AIR, MIXTRAL):
        routers = sum(layer.ffn.experts * model.hidden for layer in model.layers) * FORMAT_BYTES["bf16"]
        one = attention_rank_bytes(model, 1, "bf16") + expert_rank_bytes(model, 1, "bf16")
        many = 4 * attention_rank_bytes(model, 4, "bf16") + 2 * expert_rank_bytes(model, 2, "bf16")
        assert many == pytest.approx(one + 3 * routers, rel=1e-9)
    more = expert_rank_bytes(MIXTRAL, 2, "bf16", copies=2) / expert_rank_bytes(MIXTRAL, 2, "bf16")
    assert more == pytest.approx(5 / 4)


def test_longer_contexts_want_more_attention() -> None:
    short, long = (serving_sizes(AIR, H200, 8, Decoding(context, 0.1)) for context in (256, 32768))
    assert short is not None and long is not None and long.attention >= short.attention
    assert long.batch < short.batch


def test_a_slow_wire_is_what_bounds() -> None:
    slow = replace(H200, network=H200.network / 50, link=H200.link / 50, name="slow")
    best, worse = serving_sizes(GLM, H200, 16, ASKED), serving_sizes(GLM, slow, 16, ASKED)
    assert best is not None
    assert worse is None or (worse.tokens_per_second < best.tokens_per_second and worse.bound == "messages")


def test_the_layer_is_that_of_two_micro_batches() -> None:
    plan = serving_sizes(AIR, H200, 8, ASKED)
    assert plan is not None and plan.micro_batches == 2
    layer = layer_seconds(plan.attention_seconds, plan.expert_seconds, plan.message_seconds, 2)
    assert layer * len(AIR.layers) == pytest.approx(plan.tpot, rel=0.15)  # and the head, and a dense first layer


def test_no_experts_or_one_device_is_no_plan() -> None:
    assert serving_sizes(load_model("llama-3-8b"), H200, 8, ASKED) is None
    assert serving_sizes(MIXTRAL, H200, 1, ASKED) is None
    assert serving_sizes(GLM, H200, 2, ASKED) is None  # 700 GB do not fit
