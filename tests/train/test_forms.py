"""Forms of our own architecture, from their recipes: a knowledge base, PR-MoE, blanks, DeepNorm; staged students."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moesaic
from bench import knowledge as planted_reader
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods.rtn import RoundToNearest
from moesaic.data.packing import IGNORED, Batch
from moesaic.data.tasks.planted import Episode, planted
from moesaic.data.tokenizer_training import train_tokenizer
from moesaic.errors import UserError
from moesaic.methods import Method
from moesaic.model import directory
from moesaic.model.config import Dense, Experts, GroupedQuery, Knowledge, Layer, ModelConfig, Reading, Rope
from moesaic.model.context import Routing
from moesaic.model.knowledge import KnowledgeReading, facts_of
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.recipe_sections import SpikeSection
from moesaic.train.architecture import architecture
from moesaic.train.objectives import shifted
from moesaic.train.objectives.knowledge import Knowledge as KnowledgeObjective
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.pretrain import pretrain
from tests.train.tiny_runs import CONFIG, loss_of, trained

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ["train.steps=3", "train.batch_tokens=512", "train.warmup_steps=0", "train.save_every=3"]
SUMS = "data.sources=[{name: sums, path: 'builtin:sums', documents: 150}]"
FACTS = "data.sources=[{name: facts, path: 'builtin:facts', documents: 150}]"


@pytest.mark.parametrize(("name", "source"), [("knowledge", FACTS), ("pr-moe", SUMS), ("infilling", SUMS)])
def test_its_recipe_trains_and_the_engine_serves_it(name: str, source: str, tmp_path: Path) -> None:
    pretrain(load_recipe(RECIPES / f"{name}.yaml", [*SHORT, source]), tmp_path / "run", quiet=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    model = moesaic.load(tmp_path / "run")
    (done,) = moesaic.Engine(model).generate(["What is"], max_tokens=3, temperature=0.0, ignore_eos=True)
    assert len(done.tokens) == 3
    config = model.config
    if name == "knowledge":
        assert [isinstance(layer.ffn, Reading) for layer in config.layers] == [False, True, True, False]
    elif name == "pr-moe":
        experts = [layer.ffn for layer in config.layers]
        assert all(isinstance(ffn, Experts) and ffn.residual and ffn.shared_hidden for ffn in experts)
        assert [ffn.count for ffn in experts if isinstance(ffn, Experts)] == [2, 2, 4, 4]
    else:
        assert config.infilling is not None and config.norm == "deep" and len(config.eos) == 2


def test_what_goes_layer_by_layer_refuses_them(tmp_path: Path) -> None:
    for name, config in (("deep", deep_model("deep", 2).config), ("reader", READER)):
        model = Model(config).initialize(0)
        model.tokenizer = train_tokenizer([planted(number).text() for number in range(60)], 512)
        directory.save(Model(replace(config, vocab=512)).initialize(0), tmp_path / name, files=model.tokenizer.files)
        with pytest.raises(UserError, match="layer by layer"):
            compress(
                tmp_path / name,
                RoundToNearest(),
                tmp_path / "out",
                CompressionRequest(samples=1, length=16),
            )


@pytest.mark.parametrize("option", ["model.norm=deep", "model.infilling=true", "model.residual=true"])
def test_other_families_cannot_express_them(option: str) -> None:
    section = load_recipe(RECIPES / "tiny.yaml", [option]).model
    with pytest.raises(UserError, match="moesaic"):
        architecture(section, bos=None, eos=(0,), pad=0)


# -- the knowledge base

READER = ModelConfig(
    "moesaic",
    512,
    32,
    GroupedQuery(2, 2, 16),
    Rope(8),
    (Layer(Dense(48)), Layer(Reading(32)), Layer(Dense(48))),
    tied=True,
    knowledge=Knowledge(6),
)


def test_every_document_brings_its_own_facts() -> None:
    """Its loss is that of a model told these facts and shown the text behind them alone."""
    model, objective = Model(replace(READER, init_std=0.2)).initialize(0), KnowledgeObjective()
    reading = model.layers[1].ffn
    assert isinstance(reading, KnowledgeReading) and reading.threshold.bias is not None
    reading.threshold.bias.data.fill_(1.0)  # untrained, it would read next to nothing
    reading.value.weight.data *= 30
    tokenizer = model.tokenizer = train_tokenizer([planted(number).text() for number in range(60)], 512)
    objective.prepare(model)
    episodes = [planted(number) for number in range(2)]
    tokens = [tokenizer.encode(episode.text()) for episode in episodes]
    lengths = [len(one) for one in tokens]
    tokens_T = torch.tensor([token for one in tokens for token in one])
    batch = Batch(tokens_T, shifted(tokens_T, lengths, 1, IGNORED), lengths, [0, 0], sum(lengths) - 2)
    loss = objective(model, batch, Routing()).total
    assert model.knowledge is not None

    def told_of(others: Sequence[Episode]) -> float:
        """The loss of the episodes' texts by facts of `others`."""
        total, count = 0.0, 0
        for episode, other in zip(episodes, others, strict=True):
            text = tokenizer.encode(episode.text().partition("\n\n")[2])
            model.knowledge.know(facts_of(other.base(), tokenizer, 6, "test"))
            total -= float(model.logprobs([text])[0].sum())
            count += len(text) - 1
        return total / count

    assert float(loss.detach()) == pytest.approx(told_of(episodes), rel=1e-4)
    assert abs(float(loss.detach()) - told_of(episodes[:1] * 2)) > 0.01  # facts of the other document
    without = Model(replace(READER, knowledge=None, layers=(Layer(Dense(48)),))).initialize(0)
    with pytest.raises(UserError, match="no knowledge base"):
        objective(without, batch, Routing())


def test_exchanging_facts_changes_answers_and_not_reasoning() -> None:
    """Planted facts: trained on other facts in every sequence, it answers by whatever base it has."""
    model = planted_reader.train(planted_reader.READER, seed=0, steps=200)
    for facts in (planted_reader.base(1), planted_reader.base(2)):
        assert planted_reader.accuracy(model, facts, numbers=0.0) > 0.9
        assert planted_reader.accuracy(model, facts, numbers=1.0) > 0.9
    assert model.knowledge is not None
    first, second = planted_reader.base(1), planted_reader.base(2)
    asked = planted_reader.ask(500, 5, second, numbers=0.0)
    model.knowledge.know([[name + planted_reader.NAME, value] for name, value in enumerate(first.tolist())])
    with torch.no_grad():  # of one base asked by another: only where both say the same
        right = planted_reader.logits_SV(model, asked, own=False).argmax(-1) == asked.answers_S
    assert float(right.float().mean()) < 0.3


# -- DeepNorm


def deep_model(norm: str, layers: int = 48) -> Model:
    shape = tuple(Layer(Dense(32)) for _ in range(layers))
    config = ModelConfig("moesaic", 64, 16, GroupedQuery(2, 2, 8), Rope(8), shape, norm=norm)  # type: ignore[arg-type]
    return Model(config).initialize(0)


def first_update(norm: str) -> float:
    """How far one step moves the hidden states of a deep model, per unit of its rate: what DeepNorm bounds."""
    model, tokens_T = deep_model(norm), torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens_T, shifted(tokens_T, [64], 1, IGNORED), [64], [0], 63)
    before_TD = model(tokens_T, Layout([64])).detach()
    NextToken()(model, batch, Routing()).total.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers.") and parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad.sign()  # Adam's first step
        after_TD = model(tokens_T, Layout([64]))
    return float((after_TD - before_TD).square().mean().sqrt())


def test_deep_norm_bounds_the_first_update() -> None:
    assert first_update("deep") < 0.5 * first_update("post")


@torch.no_grad()
def test_deep_norm_by_hand() -> None:
    """A stream that counts alpha times, then the norm; and first weights that are beta times Xavier's."""
    model = deep_model("deep", layers=8)
    x_TD = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    block = model.layers[0]
    _, context = model.begin(torch.zeros(5, dtype=torch.int64), Layout([5]))
    half_TD = torch.nn.functional.rms_norm(16**0.25 * x_TD + block.attention(x_TD, context), (16,), eps=1e-6)  # type: ignore[operator]
    whole_TD = torch.nn.functional.rms_norm(16**0.25 * half_TD + block.ffn(half_TD, context), (16,), eps=1e-6)  # type: ignore[operator]
    torch.testing.assert_close(block(x_TD, context), whole_TD, rtol=1e-4, atol=1e-5)
    queries, values = (block.attention.qkv.weight[rows] for rows in (slice(0, 32), slice(32, 48)))  # type: ignore[union-attr]
    xavier = (2 / (16 + 48)) ** 0.5
    assert float(queries.std()) == pytest.approx(xavier, rel=0.15)
    assert float(values.std()) == pytest.approx(xavier * 64**-0.25, rel=0.15)


# -- Mixture-of-Students


def test_students_that_are_taught_in_stages_end_nearer_to_the_text(tmp_path: Path) -> None:
    """A teacher helps at first and holds back in the end: what it does not know the student learns from the text."""
    teacher = trained(Model(CONFIG).initialize(1), tmp_path / "teaching", rule=0, steps=60)
    directory.save(teacher, tmp_path / "teacher")
    small = Model(replace(CONFIG, layers=CONFIG.layers[1:])).initialize(0)
    losses = {}
    for share in (0.5, 1.0):
        objective = Method("distill", {"teacher": str(tmp_path / "teacher"), "teaching": share})
        settings = {"objective": objective, "spike": SpikeSection(sigmas=0)}
        losses[share] = loss_of(trained(small, tmp_path / f"student-{share}", 0, 100, **settings), 0)
    assert losses[0.5] < losses[1.0] - 0.02, losses
