"""ScaLA's noise: it goes where the loss rises, no further than it may, costs no gradient, and begins when it should."""

from __future__ import annotations

import pytest
import torch

from moesaic.errors import UserError
from moesaic.methods import Method
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.transformer import Model, run_plainly
from moesaic.recipe import Recipe
from moesaic.recipe_sections import AdversarialSection
from moesaic.train.adversarial import Adversarial, adversarial
from moesaic.train.layer_runners.embedding_shrink import EmbeddingShrink
from moesaic.train.layer_runners.token_drop import TokenDrop
from moesaic.train.objectives.next_token import NextToken
from tests.train.tiny_runs import CONFIG, batch, trained

SIZE = 0.05


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return trained(Model(CONFIG).initialize(0), tmp_path_factory.mktemp("learned"), rule=1, steps=30)


def moved(model: Model, noise_TD: torch.Tensor) -> float:
    def runner(block: torch.nn.Module, number: int, x_TD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return run_plainly(block, number, x_TD + noise_TD if number == 0 else x_TD, context)  # type: ignore[arg-type]

    with torch.no_grad():
        return float(NextToken()(model, batch(1, 5), Routing(), runner).total)


def test_noise_against_the_model_raises_the_loss_far_more_than_noise(learned: Model) -> None:
    objective = Adversarial(NextToken(), AdversarialSection(size=SIZE))
    learned.zero_grad()
    noise_TD = objective.noise(learned, batch(1, 5))
    assert all(parameter.grad is None for parameter in learned.parameters())
    one = batch(1, 5)
    embedded_TD = learned.embed.detach()[one.tokens_T]
    for noise, x in zip(noise_TD.split(one.lengths), embedded_TD.split(one.lengths), strict=True):
        assert float(noise.norm()) == pytest.approx(SIZE * float(x.norm()), rel=1e-4)
    other_TD = torch.randn(noise_TD.shape, generator=torch.Generator().manual_seed(0))
    other_TD *= noise_TD.norm() / other_TD.norm()
    plain = moved(learned, torch.zeros_like(noise_TD))
    rise, by_chance = moved(learned, noise_TD) - plain, abs(moved(learned, other_TD) - plain)
    assert rise > 5 * by_chance and rise > 0.01 * plain
    assert moved(learned, -noise_TD) < plain


def test_the_step_is_taken_from_there_and_only_when_it_is_time(learned: Model) -> None:
    objective = Adversarial(NextToken(), AdversarialSection(size=SIZE, delay=0.5, every=2))
    noise_TD = objective.noise(learned, batch(1, 5))
    plain, there = moved(learned, torch.zeros_like(noise_TD)), moved(learned, noise_TD)
    found = []
    for step in range(8):
        objective.begin_step(step, 8)
        found.append(float(objective(learned, batch(1, 5), Routing()).total.detach()))
    assert found == pytest.approx([plain] * 4 + [there, plain] * 2, rel=1e-5)
    with torch.no_grad():  # what is only evaluated is evaluated as it is
        objective.begin_step(4, 8)
        assert float(objective(learned, batch(1, 5), Routing()).total) == pytest.approx(plain, rel=1e-5)


def test_with_other_runners_the_noise_is_of_what_they_run(learned: Model) -> None:
    objective = Adversarial(NextToken(), AdversarialSection(size=SIZE))
    shrunk = EmbeddingShrink(0.1).at(0)
    torch.testing.assert_close(objective.noise(learned, batch(1, 5), shrunk), objective.noise(learned, batch(1, 5)))
    drop = TokenDrop(2, 10, start=0.5).at(0)
    objective.begin_step(9, 10)
    assert torch.isfinite(objective(learned, batch(1, 5), Routing(), drop).total)


def test_what_it_is_not_for() -> None:
    recipe = Recipe()
    assert adversarial(recipe) == NextToken()
    asked = recipe.changed(train={"adversarial": AdversarialSection()})
    assert isinstance(adversarial(asked), Adversarial)
    with pytest.raises(UserError, match="policy weighs answers"):
        adversarial(asked.changed(train={"objective": Method("policy")}))
    with pytest.raises(UserError, match="one process"):
        adversarial(asked, ranks=2)
