"""DSA's indexers learn what attention looks at, and neither they nor the model learn from the other's loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moesaic
from moesaic.errors import UserError
from moesaic.kernels.interface import mask_of
from moesaic.model import indexer_loss
from moesaic.model.config import Dense, Indexer, Latent, Layer, ModelConfig, Rope
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model, run_plainly
from moesaic.recipe import load_recipe
from moesaic.recipe_sections import IndexerTrainingSection, TrainSection
from moesaic.train.indexers import IndexerTraining
from moesaic.train.layer_runners.recompute import recompute
from moesaic.train.pretrain import pretrain

ROOT = Path(__file__).parents[2]
LENGTH, TOPK = 48, 8
CONFIG = ModelConfig(
    family="glm_moe_dsa",
    vocab=60,
    hidden=32,
    attention=Latent(2, kv_rank=16, plain_size=12, rope_size=4, value_size=12, q_rank=16, indexer=Indexer(4, 16, TOPK)),
    rope=Rope(4, interleaved=True),
    layers=(Layer(Dense(48), index="full"), Layer(Dense(48), index="shared")),
    init_std=0.35,  # so that attention of a fresh model has favourites
)


def tokens(seed: int, sequences: int = 4) -> Tensor:
    return torch.randint(60, (sequences * LENGTH,), generator=torch.Generator().manual_seed(seed))


def forward(model: Model, seed: int, teach: str | None, runner=run_plainly) -> tuple[Tensor, Routing]:
    routing = Routing(teach=teach)  # type: ignore[arg-type]
    return model(tokens(seed), Layout([LENGTH] * 4), routing, runner), routing


def training(model: Model, **options) -> IndexerTraining:
    return IndexerTraining(TrainSection(indexer=IndexerTrainingSection(**options)), model)


# One head in one layer, which an indexer can follow in a moment.
FOLLOWED = replace(CONFIG, attention=replace(CONFIG.attention, heads=1), layers=CONFIG.layers[:1])


def warmed_up(steps: int) -> Model:
    model = Model(FOLLOWED).initialize(0)
    teaching = training(model, warmup_steps=steps, frozen=True)
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if "indexer" in name], lr=0.03)
    for step in range(steps):
        teaching.begin_step(step)
        optimizer.zero_grad()
        _, routing = forward(model, 100 + step, teaching.teach)
        if loss := teaching.losses(routing, 1.0):
            loss["indexer"].backward()
            optimizer.step()
    return model


@torch.no_grad()
def recall(model: Model) -> float:
    """How much of the best that any TOPK tokens can have of dense attention the selected ones have, over queries that
    see more than twice as many."""
    found = []

    def attended(call, context):
        found.extend(indexer_loss.attention_weights(call._replace(selected=None), context))

    shown, seen = pytest.MonkeyPatch(), []
    with shown.context() as patch:
        patch.setattr("moesaic.model.attention.note_indexer_loss", attended)
        _, _ = forward(model, 7, "dense")
    select = model.ops.select_tokens
    with shown.context() as patch:
        patch.setattr(model.ops, "select_tokens", lambda *given: seen.append(select(*given)) or seen[-1])
        forward(model, 7, None)
    shares = []
    for number in range(4):
        attended_TM, chosen_TM = found[number][0][2 * TOPK :], mask(seen[0][number])[2 * TOPK :]
        best_T = attended_TM.topk(TOPK).values.sum(-1)
        shares.append(((attended_TM * chosen_TM).sum(-1) / best_T).mean())
    return float(torch.stack(shares).mean())


def mask(selected: Tensor) -> Tensor:
    return mask_of(selected, LENGTH)


class TestLearning:
    def test_after_a_warm_up_an_indexer_finds_what_dense_attention_looks_at(self) -> None:
        fresh, taught = recall(warmed_up(0)), recall(warmed_up(80))
        assert fresh < 0.5
        assert taught > 0.8

    def test_without_the_divergence_it_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(indexer_loss, "divergence", lambda scores_TM, *_: 0.0 * scores_TM.sum(-1))
        assert recall(warmed_up(10)) == pytest.approx(recall(warmed_up(0)), abs=0.02)

    def test_scores_that_are_the_logarithm_of_attention_lose_nothing(self) -> None:
        attended_TM = torch.rand(5, 9).softmax(-1)
        seen_TM = torch.rand(5, 9) < 0.7
        attended_TM = attended_TM * seen_TM / (attended_TM * seen_TM).sum(-1, keepdim=True)
        nothing_T = indexer_loss.divergence(attended_TM.log() + 3.0, attended_TM, seen_TM)
        torch.testing.assert_close(nothing_T, torch.zeros(5), atol=1e-5, rtol=0.0)
        expected = torch.distributions.kl_divergence(
            torch.distributions.Categorical(attended_TM[0][seen_TM[0]]),
            torch.distributions.Categorical(logits=torch.arange(9.0)[seen_TM[0]]),
        )
        found_T = indexer_loss.divergence(torch.arange(9.0).expand(5, 9), attended_TM, seen_TM)
        torch.testing.assert_close(found_T[0], expected)


class TestApart:
    @pytest.mark.parametrize("teach", ["dense", "sparse"])
    def test_neither_learns_from_the_loss_of_the_other(self, teach: str) -> None:
        model = Model(CONFIG).initialize(1)
        hidden_TD, routing = forward(model, 1, teach)
        own = {name: p for name, p in model.named_parameters() if "indexer" in name}
        others = {name: p for name, p in model.named_parameters() if name not in own}
        hidden_TD.square().sum().backward(retain_graph=True)
        assert all(p.grad is None for p in own.values())
        assert all(p.grad is not None for name, p in others.items() if name != "head")
        model.zero_grad()
        torch.stack(routing.indexer_losses[0]).mean().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())
        assert all(p.grad is None for p in others.values())

    def test_teaching_changes_no_bit_of_a_sparse_forward(self) -> None:
        model = Model(CONFIG, mode="invariant").initialize(1)
        assert torch.equal(forward(model, 1, "sparse")[0], forward(model, 1, None)[0])

    def test_a_warm_up_leaves_the_rest_of_the_model_alone(self) -> None:
        model = Model(CONFIG).initialize(0)
        teaching = training(model, warmup_steps=1, frozen=True)
        learning = []
        for step in range(2):
            teaching.begin_step(step)
            learning.append({name for name, p in model.named_parameters() if p.requires_grad})
        assert learning[0] and all("indexer" in name for name in learning[0])
        assert learning[1] == {name for name, _ in model.named_parameters()}


def test_an_indexer_learns_from_every_layer_it_serves() -> None:
    """With the gradient of the mean of what they look at."""
    model = Model(CONFIG).initialize(3)
    _, routing = forward(model, 2, "dense")
    assert list(routing.indexer_losses) == [0] and len(routing.indexer_losses[0]) == 2
    one, other = routing.indexer_losses[0]
    weight = model.layers[0].attention.indexer.keys.weight
    gradients = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (one, other)]
    assert (gradients[0] - gradients[1]).abs().max() > 0.1 * gradients[0].abs().max()
    both = training(model).losses(routing, 1.0)["indexer"]
    torch.testing.assert_close(torch.autograd.grad(both, weight)[0], sum(gradients) / 2)


@pytest.mark.parametrize("teach", ["dense", "sparse"])
def test_recomputation_changes_no_gradient_of_an_indexer(teach: str) -> None:
    layers = [Layer(Dense(48), index=kind) for kind in ("full", "shared", "full", "shared")]
    model, found = Model(replace(CONFIG, layers=tuple(layers))).initialize(4), []
    for runner in (run_plainly, recompute):
        model.zero_grad()
        hidden_TD, routing = forward(model, 2, teach, runner)
        (hidden_TD.square().sum() + training(model).losses(routing, 1.0)["indexer"]).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


SMALL = [
    *("model.vocab=300", "model.layers=2", "model.hidden=32", "model.context=64", "model.indexer.topk=8"),
    *("data.sequence_length=64", "data.sources.0.documents=3", "data.sources.1.documents=200"),
    *("train.batch_tokens=512", "train.warmup_steps=2", "train.evaluate_every=0"),
]


def test_the_recipe_trains_from_scratch_and_on_from_a_dense_model(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "dsa.yaml"
    scratch = load_recipe(recipe, [*SMALL, "train.steps=30", "train.indexer.warmup_steps=10"])
    pretrain(scratch, tmp_path / "scratch", quiet=True)
    steps = [json.loads(line) for line in (tmp_path / "scratch" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"] and steps[-1]["loss/indexer"] < 0.5
    assert moesaic.load(tmp_path / "scratch").config.attention.indexer.topk == 8

    init = [f"train.init={tmp_path / 'scratch'}", f"train.data={tmp_path / 'scratch' / 'data'}"]
    only_train = [option for option in SMALL if not option.startswith("model.")]
    on = load_recipe(recipe, [*only_train, *init, "train.steps=4", "train.indexer.warmup_steps=4"])
    pretrain(on, tmp_path / "on", quiet=True)
    before, after = (moesaic.load(tmp_path / name).state_dict() for name in ("scratch", "on"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("indexer" in name for name in changed)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UserError, match="no indexer"):
        training(Model(replace(CONFIG, attention=replace(CONFIG.attention, indexer=None), layers=(Layer(Dense(8)),))))
    with pytest.raises(UserError, match="one process"):
        IndexerTraining(TrainSection(indexer=IndexerTrainingSection()), Model(CONFIG), ranks=2)
