"""The router's choices can be recorded and replayed, and what no family of `transformers` has is right too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moesaic
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model import directory
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.router import Router
from moesaic.model.transformer import Model

EXPERTS = Experts(count=6, per_token=2, hidden=16)
CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab=50,
    hidden=24,
    attention=GroupedQuery(4, 2, 8, qk_norm=True),
    rope=Rope(8),
    layers=(Layer(EXPERTS), Layer(EXPERTS)),
    init_std=0.3,
)
TOKENS = torch.tensor([3, 9, 27, 31, 4, 14])
LAYOUT = Layout([4, 2])


def test_recorded_choices_replay_to_the_same_bits():
    model = Model(CONFIG).initialize(1)
    routing = Routing()
    hidden = model(TOKENS, LAYOUT, routing)
    assert set(routing.choices) == {0, 1} and routing.choices[0].shape == (6, 2)
    replayed = model(TOKENS, LAYOUT, Routing(choices=dict(routing.choices), replay=True))
    assert torch.equal(hidden, replayed)


def test_replayed_choices_are_followed_not_recomputed():
    model = Model(CONFIG).initialize(1)
    routing = Routing()
    hidden = model(TOKENS, LAYOUT, routing)
    other = {layer: (choice + 1) % 6 for layer, choice in routing.choices.items()}
    changed = Routing(choices=dict(other), replay=True)
    assert not torch.allclose(hidden, model(TOKENS, LAYOUT, changed))
    assert all(torch.equal(changed.choices[layer], other[layer]) for layer in other)


def test_routing_is_float32_in_a_bfloat16_model():
    router = Router(24, replace(EXPERTS, score="sigmoid", correction=True), 0)
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    routes, weights = router(x)
    routes32, weights32 = router(x.float())
    assert weights.dtype == torch.float32
    assert torch.equal(routes, routes32) and torch.equal(weights, weights32)


def test_the_balance_bias_moves_choices_but_not_weights():
    router = Router(8, Experts(count=4, per_token=1, hidden=4, score="sigmoid", correction=True, normalize=False), 0)
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(4))
        router.correction += torch.tensor([0.0, 0.0, 5.0, 0.0])
    routes, weights = router(x)
    assert (routes == 2).all()
    torch.testing.assert_close(weights[:, 0], torch.sigmoid(x @ router.weight[2]))


def test_logits_are_kept_only_when_asked_for():
    model = Model(CONFIG).initialize(1)
    silent, kept = Routing(), Routing(keep_logits=True)
    model(TOKENS, LAYOUT, silent)
    model(TOKENS, LAYOUT, kept)
    assert not silent.logits
    assert torch.equal(kept.logits[1].topk(2).indices, kept.choices[1])


PYRAMID = replace(
    CONFIG,
    layers=(
        Layer(Dense(40)),
        Layer(Experts(count=4, per_token=1, hidden=16, shared_hidden=16, residual=True)),
        Layer(Experts(count=8, per_token=1, hidden=16, shared_hidden=16, residual=True)),
    ),
)


def test_pyramid_and_residual_expert_by_hand():
    """DeepSpeed-MoE: more experts in later layers; the dense network and the expert are mixed by a learned share."""
    model = Model(PYRAMID).initialize(2)
    ffn = model.layers[2].ffn
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(5))
    _, context = model.begin(torch.zeros(5, dtype=torch.int64), Layout([5]))
    chosen = ffn.router(x)
    routes, weights = chosen.experts_TK, chosen.weights_TK
    assert ffn.gate_up_EGD.shape[0] == 8 and model.layers[1].ffn.gate_up_EGD.shape[0] == 4

    def network(gate_up, down, row):
        gate, up = (gate_up @ row).chunk(2)
        return down @ (torch.nn.functional.silu(gate) * up)

    for token, row in enumerate(x):
        expert = int(routes[token, 0])
        routed = network(ffn.gate_up_EGD[expert], ffn.down_EDF[expert], row) * weights[token, 0]
        dense = network(ffn.shared.gate_up.weight, ffn.shared.down.weight, row)
        share = torch.softmax(ffn.residual.weight @ row + ffn.residual.bias, 0)
        torch.testing.assert_close(ffn(x, context)[token], share[0] * dense + share[1] * routed, rtol=1e-4, atol=1e-5)


def test_what_no_family_expresses_is_written_in_our_own_architecture(tmp_path):
    model = Model(PYRAMID).initialize(2)
    directory.save(model, tmp_path / "pyramid")
    again = moesaic.load(tmp_path / "pyramid")
    assert again.config == replace(PYRAMID, family="moesaic")
    assert torch.equal(again.logits([[1, 2, 3]])[0], model.logits([[1, 2, 3]])[0])


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("sizes", [(24, 16), (22, 15)])
@pytest.mark.parametrize("skew", [False, True], ids=["spread", "one expert"])
def test_fast_experts_equal_the_reference(tokens, sizes, skew):
    from moesaic.kernels import cpu, reference

    hidden, width = sizes
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    gate_up = torch.randn(6, 2 * width, hidden, generator=generator)
    down = torch.randn(6, hidden, width, generator=generator)
    routes = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(tokens)])
    routes = torch.zeros_like(routes) + torch.arange(3) if skew else routes
    weights = torch.rand(tokens, 3, generator=generator)
    expected = reference.experts(x, Routes(routes, weights), ExpertWeights(gate_up, down, "silu"))
    with torch.no_grad():
        close(cpu.experts(x, Routes(routes, weights), ExpertWeights(gate_up, down, "silu")), expected)
    close(cpu.experts(x, Routes(routes, weights), ExpertWeights(gate_up, down, "silu")), expected)
