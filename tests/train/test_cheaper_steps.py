"""Token dropping, layer dropping, recomputation and embedding shrink: exact when off, right when on."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.model.config import Dense, Experts, GroupedQuery, Indexer, Latent, Layer, ModelConfig, Rope
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model, run_plainly
from moesaic.train.layer_runners.embedding_shrink import EmbeddingShrink
from moesaic.train.layer_runners.layer_drop import LayerDrop
from moesaic.train.layer_runners.recompute import recompute
from moesaic.train.layer_runners.token_drop import TokenDrop
from tests.train.small import small_mixture

MIXTURE = Layer(Experts(count=4, per_token=2, hidden=16, shared_hidden=16))
CONFIG = small_mixture(50, 24, GroupedQuery(4, 2, 8), Rope(8), [Layer(Dense(32)), *[MIXTURE] * 4])
SPARSE = ModelConfig(
    family="glm_moe_dsa",
    vocab=50,
    hidden=24,
    attention=Latent(2, kv_rank=12, plain_size=6, rope_size=4, value_size=6, q_rank=10, indexer=Indexer(4, 8, 3)),
    rope=Rope(4, interleaved=True),
    layers=tuple(Layer(Dense(32), index=kind) for kind in ("full", "shared", "full", "shared")),
    init_std=0.2,
)
TOKENS = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(0))
LENGTHS = [17, 1, 12, 10]


def gradients(model: Model, runner) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    hidden = model(TOKENS, Layout(LENGTHS), Routing(), runner)
    hidden.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), grads


def same(a, b) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in b[1])


@pytest.mark.parametrize("config", [CONFIG, SPARSE], ids=["experts", "shared selection"])
def test_recomputation_changes_no_bit(config):
    model = Model(config).initialize(1)
    assert same(gradients(model, recompute), gradients(model, run_plainly))


@pytest.mark.parametrize(
    "off",
    [
        TokenDrop(5, steps=10).at(10),
        TokenDrop(5, steps=10, start=1.0).at(0),
        LayerDrop(5, floor=1.0).at(3),
        LayerDrop(5, floor=0.5, gamma=0.0).at(3),
        EmbeddingShrink(1.0).at(0),
    ],
)
def test_off_is_exact(off):
    model = Model(CONFIG).initialize(1)
    assert same(gradients(model, off), gradients(model, run_plainly))


@pytest.mark.parametrize("kind", [TokenDrop(5, 10, seed=(1 << 63) - 1), LayerDrop(5, gamma=1.0, seed=(1 << 63) - 1)])
def test_the_greatest_seed_of_a_recipe_draws_too(kind):
    model = Model(CONFIG).initialize(1)
    assert torch.isfinite(gradients(model, kind.at(9))[0]).all()


def test_dropped_tokens_skip_middle_layers_and_only_those():
    model = Model(CONFIG).initialize(1)
    seen: dict[int, int] = {}

    def watch(block, number, x_TD, context):
        seen[number] = len(x_TD)
        assert sum(span.new for span in context.layout.spans) == len(x_TD) == len(context.rope.cos_TR)
        return run_plainly(block, number, x_TD, context)

    drop = TokenDrop(5, steps=100, start=0.5)
    model(TOKENS, Layout(LENGTHS), None, drop.at(20, watch))
    assert drop.share(20) == pytest.approx(0.6)
    assert seen == {0: 40, 1: 24, 2: 24, 3: 24, 4: 40}
    assert drop.cost(20) == pytest.approx(1 - 0.4 * 3 / 5) and drop.cost(100) == 1.0


def test_each_layer_drops_other_tokens_and_they_pass_unchanged():
    model = Model(CONFIG).initialize(1)
    kept = []

    def add_one(block, number, x_TD, context):
        return x_TD + 1 if 0 < number < 4 else x_TD

    drop = TokenDrop(5, steps=100, start=0.5)
    runner = drop.at(0, add_one)
    _, context = model.begin(TOKENS, Layout(LENGTHS))
    for number in (1, 2, 3):
        out = runner(model.layers[number], number, torch.zeros(40, 24), context)
        assert set(out.unique().tolist()) == {0.0, 1.0}
        kept.append(out[:, 0].bool())
        assert int(kept[-1].sum()) == 20
    assert not torch.equal(kept[0], kept[1])


def test_kept_tokens_keep_their_positions_and_neighbours():
    """A layer over a subset equals the layer over a batch made of that subset, at the same positions."""
    model = Model(CONFIG).initialize(1)
    captured = {}

    def grab(block, number, x_TD, context):
        captured[number] = (x_TD, context)
        return run_plainly(block, number, x_TD, context)

    model(TOKENS, Layout(LENGTHS), None, TokenDrop(5, steps=100, start=0.5, seed=3).at(0, grab))
    x_TD, context = captured[2]
    lengths = [span.new for span in context.layout.spans]
    _, alone = model.begin(x_TD, Layout(lengths, positions=context.layout.positions_T))
    torch.testing.assert_close(model.layers[2](x_TD, context), model.layers[2](x_TD, alone))
    for span in context.layout.spans:
        positions = context.layout.positions_T[span.start : span.stop]
        assert (positions.diff() > 0).all()


def test_layer_drop_probabilities_are_the_papers():
    drop = LayerDrop(10, floor=0.5, gamma=0.01)
    theta = 0.5 * math.exp(-0.01 * 70) + 0.5
    assert drop.keep(9, 70) == pytest.approx(theta)
    assert drop.keep(4, 70) == pytest.approx(1 - 0.5 * (1 - theta))
    assert drop.keep(9, 0) == 1.0


def test_dropped_layers_keep_the_expectation():
    model = Model(CONFIG).initialize(1)
    drop = LayerDrop(5, floor=0.3, gamma=1.0)
    _, context = model.begin(TOKENS, Layout(LENGTHS))
    x_TD = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))

    def double(block, number, x_TD, context):
        return 2 * x_TD

    outs = [drop.at(step, double)(model.layers[4], 4, x_TD, context) for step in range(100, 1100)]
    ran = sum(not torch.equal(out, x_TD) for out in outs) / len(outs)
    assert ran == pytest.approx(drop.keep(4, 1000), abs=0.05)
    torch.testing.assert_close(torch.stack(outs).mean(0), 2 * x_TD, rtol=0.1, atol=0.1)


def test_embedding_learns_its_share():
    model = Model(CONFIG).initialize(1)
    plain = gradients(model, run_plainly)
    shrunk = gradients(model, EmbeddingShrink(0.1).at(0))
    assert torch.equal(plain[0], shrunk[0])
    torch.testing.assert_close(shrunk[1]["embed"], 0.1 * plain[1]["embed"], rtol=1e-4, atol=1e-5)
    for name in plain[1]:
        if name != "embed":
            torch.testing.assert_close(shrunk[1][name], plain[1][name])
