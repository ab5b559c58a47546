"""Balance: the bias evens out the load, the losses are the papers' formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moesaic.model.config import Experts, GroupedQuery, Layer, Rope
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe_sections import BalanceSection
from moesaic.train.balance import Balance, sequence_loss
from moesaic.train.layer_runners.token_drop import TokenDrop
from tests.train.small import small_mixture

EXPERTS = Experts(count=8, per_token=2, hidden=8, score="sigmoid", correction=True)
CONFIG = small_mixture(
    64, 16, GroupedQuery(2, 1, 8), Rope(8), [Layer(EXPERTS), Layer(EXPERTS)], mtp=(Layer(EXPERTS),), init_std=0.5
)


def test_the_bias_evens_out_the_load():
    model = Model(CONFIG).initialize(3)
    for block in model.layers:
        block.ffn.router.correction[2] += 0.3  # nearly every token goes there
    balance = Balance(model, BalanceSection(bias_rate=0.01))
    tokens = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(1))

    def imbalance() -> float:
        routing = balance.routing()
        with torch.no_grad():
            model(tokens, Layout([128, 128]), routing)
        balance.count(routing)
        loads = balance.update()
        assert {layer: int(load.sum()) for layer, load in loads.items()} == {0: 512, 1: 512}
        return max(float(load.max() / load.float().mean()) for load in loads.values())

    before = imbalance()
    for _ in range(150):
        after = imbalance()
    assert before > 1.6 and after < 1.25


def test_rate_zero_leaves_the_bias_alone():
    model = Model(CONFIG).initialize(3)
    balance = Balance(model, BalanceSection(bias_rate=0.0))
    balance.count(Routing(choices={0: torch.tensor([[0, 1]])}))
    balance.update()
    assert not model.layers[0].ffn.router.correction.any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_bias_moves_in_small_steps_whatever_the_weights_are(kind):
    model = Model(CONFIG).initialize(3)
    router = model.layers[0].ffn.router
    router.correction[:2] = torch.tensor([1.0 + 1e-6, -1.0])
    model.to(kind)
    assert router.weight.dtype == kind and router.correction[0] == torch.tensor(1.0 + 1e-6)
    balance = Balance(model, BalanceSection(bias_rate=0.001))
    for _ in range(10):
        balance.count(Routing(choices={0: torch.tensor([[0, 2]])}))
        balance.update()
    torch.testing.assert_close(router.correction[:2], torch.tensor([0.99, -0.99]), rtol=0, atol=1e-5)


def test_prediction_layers_are_counted_too():
    balance = Balance(Model(CONFIG).initialize(3), BalanceSection())
    assert set(balance.layers) == {0, 1, 2}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_sequence_loss_by_hand(score):
    shape = Experts(count=3, per_token=1, hidden=4, score=score)
    logits = torch.tensor([[2.0, 0.0, -1.0], [1.0, 1.5, 0.0], [0.0, 0.0, 3.0]])
    routes = torch.tensor([[0], [1], [2]])
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    first = sum(3 * 0.5 * scores[:2, e].mean() for e in (0, 1))  # two tokens, one to each of experts 0 and 1
    second = 3 * scores[2, 2]
    expected = (2 * first + 1 * second) / 3
    torch.testing.assert_close(sequence_loss(logits, routes, [2, 1], shape), expected)


def test_even_routing_has_the_least_sequence_loss():
    shape = Experts(count=4, per_token=1, hidden=4)
    routes = torch.arange(4)[:, None]
    even = sequence_loss(torch.zeros(4, 4), routes, [4], shape)
    assert float(even) == pytest.approx(1.0)
    skewed = torch.zeros(4, 4)
    skewed[:, 0] = 3.0
    assert float(sequence_loss(skewed, torch.zeros(4, 1, dtype=torch.long), [4], shape)) > 2


def test_z_loss_is_the_mean_square_of_the_log_sum():
    model = Model(CONFIG).initialize(3)
    balance = Balance(model, BalanceSection(z_loss=0.5))
    routing = balance.routing()
    model(torch.arange(10), Layout([10]), routing)
    expected = torch.stack([logits.logsumexp(-1).square().mean() for logits in routing.logits.values()]).mean() * 0.5
    torch.testing.assert_close(balance.losses(routing, 1.0)["z"], expected)
    assert expected.requires_grad


def test_the_sequence_loss_is_of_the_sequences_that_a_layer_saw():
    """Where an objective makes others of the batch's, and where a layer sees some of their tokens only."""
    model = Model(CONFIG).initialize(3)
    balance = Balance(model, BalanceSection(sequence_loss=1.0))
    shape, lengths = CONFIG.layers[0].ffn, [8, 1, 1, 1, 9]

    routing = balance.routing()
    model(torch.arange(20), Layout(lengths), routing)
    terms = [sequence_loss(routing.logits[n], routing.choices[n], lengths, shape) for n in (0, 1)]
    torch.testing.assert_close(balance.losses(routing, 0.5)["sequence"], torch.stack(terms).mean() * 0.5)

    four = replace(CONFIG, layers=CONFIG.layers * 2)
    balance = Balance(Model(four).initialize(3), BalanceSection(sequence_loss=1.0))
    routing = balance.routing()
    drop = TokenDrop(layers=4, steps=10, start=0.3, seed=1)
    Model(four).initialize(3)(torch.arange(20), Layout(lengths), routing, drop.at(0))
    seen = [routing.kept.get(n, lengths) for n in range(4)]
    assert list(map(sum, seen)) == [20, 6, 6, 20] and 0 in seen[1]
    terms = [sequence_loss(routing.logits[n], routing.choices[n], seen[n], shape) for n in range(4)]
    assert all(term.isfinite() for term in terms)
    torch.testing.assert_close(balance.losses(routing, 1.0)["sequence"], torch.stack(terms).mean())
