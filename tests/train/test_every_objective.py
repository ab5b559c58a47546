"""One matrix for every objective: it depends on weights and batch alone, trains what it should, resumes to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moesaic.data.packing import IGNORED, Batch
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model import directory
from moesaic.model.block import Block
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, Rope
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.transformer import Model, run_plainly
from moesaic.model.value_head import give_head
from moesaic.train.objectives import Loss, Objective, shifted
from moesaic.train.optimizers.adamw import AdamW
from tests.matrix import OBJECTIVES, filled
from tests.train.small import small_mixture

MIXTURE = Layer(Experts(count=4, per_token=2, hidden=16, score="sigmoid", correction=True))
CONFIG = small_mixture(60, 24, GroupedQuery(2, 1, 12), Rope(6), [Layer(Dense(32)), MIXTURE], mtp=(MIXTURE,))
MARKS = {"[MASK]": 57, "<sop>": 58, "<eop>": 59}


def new_model(seed: int = 1) -> Model:
    """With all that any objective trains: prediction layers and a value head."""
    model = Model(CONFIG).initialize(seed)
    head = give_head(model)
    with torch.no_grad():
        head.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    fast = SimpleNamespace(token_to_id=MARKS.get)
    model.tokenizer = SimpleNamespace(fast=fast, decode=lambda tokens, special: str(tokens))  # type: ignore[assignment]
    return model


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "model"
    directory.save(Model(CONFIG).initialize(2), path)
    return path


def made(name: str, model: Model, other: Path) -> Objective:
    objective = build(Method(name, filled(OBJECTIVES[name].options, other=other)), Objective, "recipe")
    objective.check()
    objective.prepare(model)
    return objective


LENGTHS = [9, 7, 12, 8, 6, 5]  # a better and a worse answer, three times


def batch(masked: tuple[int, ...] = (), lengths: list[int] = LENGTHS, seed: int = 0) -> Batch:
    """Pairs of sequences with every column that an objective reads. Nothing is to be learned from the `masked` ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(0, 57, (sum(lengths),), generator=generator)
    targets_T = shifted(tokens_T, lengths, 1, IGNORED)
    size, pairs = len(tokens_T), len(lengths) // 2
    columns = {
        # policy
        "weight": torch.full((size,), 1 / size),
        "old": -torch.rand(size, generator=generator) - 3.6,
        "advantage": torch.ones(size),
        "fresh": torch.ones(size),
        # preference
        "reference": torch.zeros(size),
        "margin": torch.zeros(size),
        "pair_weight": torch.ones(size),
        # reward_model
        "side": torch.zeros(size),
        "label": torch.full((size,), -1.0),
        "share": torch.full((size,), 1 / pairs),
    }
    start = 0
    for number, length in enumerate(lengths):
        end, worse = start + length, number % 2
        columns["advantage"][start:end] = -1.0 if worse else 1.0
        if number in masked:
            targets_T[start:end] = IGNORED
            columns["weight"][start:end] = columns["pair_weight"][start:end] = 0
        else:
            columns["label"][start + 2] = 1.0 - worse
        columns["side"][end - 1] = -1.0 if worse else 1.0
        start = end
    return Batch(tokens_T, targets_T, lengths, [0] * len(lengths), size - len(lengths), columns=columns)


def step(objective: Objective, model: Model, examples: Batch) -> Loss:
    model.zero_grad()
    loss = objective(model, examples, Routing())
    loss.total.backward()
    return loss


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", OBJECTIVES)
class TestEveryObjective:
    def test_is_found_by_its_name(self, name: str) -> None:
        options = filled(OBJECTIVES[name].options, other="somewhere")
        assert type(build(Method(name, options), Objective, "recipe")).__module__.endswith(f".{name}")

    def test_refuses_an_option_it_has_not(self, name: str) -> None:
        options = {**filled(OBJECTIVES[name].options, other="somewhere"), "nothing": 1}
        with pytest.raises(UserError, match="no such option"):
            build(Method(name, options), Objective, "recipe")

    def test_the_same_weights_and_batch_give_the_same_bits(self, name: str, other: Path) -> None:
        found = []
        for _ in range(2):
            model = new_model()
            loss = step(made(name, model, other), model, batch())
            found.append((loss.total.detach(), loss.parts, loss.notes, gradients(model)))
        (total, parts, notes, grads), again = found
        assert torch.equal(total, again[0])
        for one, another in zip((parts, notes, grads), again[1:], strict=True):
            assert one.keys() == another.keys()
            assert all(torch.equal(one[key], another[key]) for key in one)

    def test_gradients_are_finite_and_reach_the_weights_that_are_trained(self, name: str, other: Path) -> None:
        model = new_model()
        loss = step(made(name, model, other), model, batch())
        found = gradients(model)
        assert loss.total.isfinite() and all(gradient.isfinite().all() for gradient in found.values())
        reached = {key for key, gradient in found.items() if gradient.any()}
        assert {key.partition(".")[0] for key in reached} == OBJECTIVES[name].reaches
        assert all(
            key in reached for key, p in model.named_parameters() if key.startswith("layers.") and p.requires_grad
        )
        assert all(value.requires_grad is False for value in (*loss.parts.values(), *loss.notes.values()))

    def test_layers_are_run_by_the_runner_and_routes_recorded(self, name: str, other: Path) -> None:
        model, ran = new_model(), []

        def runner(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
            ran.append(number)
            return run_plainly(block, number, x_TD, context)

        routing = Routing()
        loss = made(name, model, other)(model, batch(), routing, runner)
        assert ran == [0, 1] and loss.routing is routing and 1 in routing.choices

    def test_it_falls_where_there_is_little_to_learn(self, name: str, other: Path) -> None:
        model, examples = new_model(), batch()
        objective = made(name, model, other)
        optimizer = AdamW(lr=0.01).build(dict(model.named_parameters()).items())
        losses = []
        for _ in range(40):
            losses.append(float(step(objective, model, examples).total.detach()))
            optimizer.step(1.0, clip=1.0)
        assert losses[0] - losses[-1] > max(0.05, 0.3 * abs(losses[0]))

    def test_goes_on_after_a_save_to_the_bit(self, name: str, other: Path) -> None:
        """What an objective holds is made anew from the recipe: nothing of it need be saved."""
        whole = new_model()
        objective = made(name, whole, other)
        optimizer = AdamW(lr=0.01).build(dict(whole.named_parameters()).items())
        for number in range(6):
            if number == 3:
                weights, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
            step(objective, whole, batch(seed=number))
            optimizer.step(1.0, clip=1.0)
        resumed = new_model(seed=3)
        resumed.load_state_dict(weights)
        objective = made(name, resumed, other)
        optimizer = AdamW(lr=0.01).build(dict(resumed.named_parameters()).items())
        optimizer.load_state_dict(state)
        for number in range(3, 6):
            step(objective, resumed, batch(seed=number))
            optimizer.step(1.0, clip=1.0)
        assert all(torch.equal(value, whole.state_dict()[key]) for key, value in resumed.state_dict().items())

    def test_what_is_masked_is_not_learned(self, name: str, other: Path) -> None:
        """The tokens of a masked pair change neither loss nor gradient, but where targets are the objective's own."""
        model, examples = new_model(), batch(masked=(2, 3))
        changed = examples.tokens_T.clone()
        start, end = sum(LENGTHS[:2]), sum(LENGTHS[:4])
        changed[start:end] = (changed[start:end] + 1) % 57
        found = []
        for tokens_T in (examples.tokens_T, changed):
            loss = step(made(name, model, other), model, replace(examples, tokens_T=tokens_T))
            found.append({"loss": loss.total.detach()} | gradients(model))
        same = [torch.allclose(one, found[1][key], rtol=1e-4, atol=1e-6) for key, one in found[0].items()]
        assert all(same) == OBJECTIVES[name].by_targets
