"""Generalized cross-attention: a feed-forward network is its closed form; facts are read from a base, and exchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.cli import main
from moesaic.data.tasks.planted import planted
from moesaic.data.tokenizer_training import train_tokenizer
from moesaic.errors import UserError
from moesaic.kernels import reference
from moesaic.model import directory
from moesaic.model.config import Dense, GroupedQuery, Knowledge, Layer, ModelConfig, Reading, Rope
from moesaic.model.context import ForwardContext
from moesaic.model.knowledge import KnowledgeReading, facts_of
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

WORDS = 5
CONFIG = ModelConfig(
    "moesaic",
    512,
    32,
    GroupedQuery(2, 1, 16),
    Rope(8),
    (Layer(Dense(32)), Layer(Reading(16)), Layer(Reading(16)), Layer(Dense(32))),
    init_std=0.2,
    knowledge=Knowledge(WORDS),
)
FACTS = [[5, 6, 7], [8, 9], [10, 6, 11, 12, 13]]
OTHER = [[5, 6, 99], [8, 98]]
TOKENS = [3, 5, 6, 8, 20, 21]


@pytest.fixture
def model() -> Model:
    made = Model(CONFIG).initialize(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():  # else norms and thresholds are all alike
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(len(parameter), generator=torch.Generator().manual_seed(len(name)))
    return made


def reading(model: Model) -> KnowledgeReading:
    found = model.layers[1].ffn
    assert isinstance(found, KnowledgeReading)
    return found


def context_of(model: Model, layout: Layout) -> ForwardContext:
    return model.begin(torch.zeros(layout.tokens, dtype=torch.int64), layout)[1]


@torch.no_grad()
def test_with_a_fixed_base_it_is_a_feed_forward_network(model: Model) -> None:
    """The paper's equivalence, by the plain formula of a network with as many neurons as there are entries."""
    assert model.knowledge is not None
    model.knowledge.know(FACTS)
    x_TD = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    context = context_of(model, Layout([7]))
    assert context.facts is not None
    up_MD, bias_M, down_DM = reading(model).closed_form(context.facts, context.ops)
    assert up_MD.shape == (3, 32) and down_DM.shape == (32, 3)
    network_TD = torch.relu(x_TD @ up_MD.T + bias_M) @ down_DM.T
    read_TD = reading(model)(x_TD, context)
    torch.testing.assert_close(read_TD, network_TD, rtol=1e-4, atol=1e-5)
    active_TM = torch.relu(x_TD @ up_MD.T + bias_M) > 0
    assert active_TM.any() and not active_TM.all()  # thresholds choose


def test_facts_are_read_and_exchanged(model: Model) -> None:
    assert model.knowledge is not None
    nothing = model.logits([TOKENS])[0]
    found = []
    for facts in (FACTS, OTHER, FACTS):
        model.knowledge.know(facts)
        found.append(model.logits([TOKENS])[0])
    assert not torch.allclose(found[0], nothing, atol=1e-3) and not torch.allclose(found[0], found[1], atol=1e-3)
    assert torch.equal(found[0], found[2])


def test_what_is_kept_of_a_base_is_made_anew_when_weights_change(model: Model) -> None:
    assert model.knowledge is not None
    model.knowledge.know(FACTS)
    before = model.logits([TOKENS])[0]
    with torch.no_grad():
        reading(model).value.weight.mul_(2)
    changed = model.logits([TOKENS])[0]
    fresh = Model(CONFIG)
    fresh.load_state_dict(model.state_dict())
    assert fresh.knowledge is not None
    fresh.knowledge.know(FACTS)
    assert not torch.allclose(before, changed, atol=1e-3) and torch.equal(changed, fresh.logits([TOKENS])[0])


@torch.no_grad()
def test_a_sequence_reads_its_own_facts_alone(model: Model) -> None:
    tokens_T = torch.tensor(TOKENS * 2)
    together = model(tokens_T, Layout([6, 6], facts=[FACTS, OTHER]))
    for number, facts in enumerate((FACTS, OTHER)):
        alone = model(torch.tensor(TOKENS), Layout([6], facts=[facts]))
        torch.testing.assert_close(together.split(6)[number], alone, rtol=1e-4, atol=1e-5)


def test_the_reference_kernels_read_the_same(model: Model) -> None:
    assert model.knowledge is not None
    model.knowledge.know(FACTS)
    fast = model.logits([TOKENS])[0]
    model.ops = reference  # type: ignore[assignment]
    torch.testing.assert_close(fast, model.logits([TOKENS])[0], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, untrained."""
    model = Model(CONFIG).initialize(0)
    model.tokenizer = train_tokenizer([planted(number).text() for number in range(50)], 512)
    path = tmp_path_factory.mktemp("knowledge") / "model"
    directory.save(model, path)
    return path


def test_the_engine_serves_the_facts_of_a_directory(folder: Path, tmp_path: Path) -> None:
    """Exchanged by the command, with the weights as they were; as if the model had been told."""
    (tmp_path / "facts.txt").write_text("Anna is 4\n\nKarl is 9\n")
    assert main(["convert", str(folder), str(tmp_path / "knows"), "--knowledge", str(tmp_path / "facts.txt")]) == 0
    told, knows = moesaic.load(folder), moesaic.load(tmp_path / "knows")
    assert all(torch.equal(value, knows.state_dict()[name]) for name, value in told.state_dict().items())
    assert told.knowledge is not None and told.tokenizer is not None and not told.knowledge.facts
    prompt = told.tokenizer.encode("What is Anna?")
    without = told.logits([prompt])[0]
    told.knowledge.know(facts_of("Anna is 4\nKarl is 9", told.tokenizer, WORDS, "facts"))
    expected = told.logits([prompt])[0]
    assert torch.equal(knows.logits([prompt])[0], expected) and not torch.allclose(expected, without, atol=1e-3)
    (done,) = moesaic.Engine(knows).generate([prompt], max_tokens=1, temperature=0.0)
    assert done.tokens == [int(expected[-1].argmax())]
    assert done.logprobs[0].logprob == pytest.approx(float(expected[-1].log_softmax(-1).max()), abs=1e-5)


def test_what_cannot_be_known_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.txt").write_text("Anna is 4 and Karl is 9 and Mara is 7\n")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--knowledge", str(tmp_path / "long.txt")]) == 2
    assert "fact 1" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "out"), "--knowledge", str(tmp_path / "none.txt")]) == 2
    with pytest.raises(UserError, match="no base to read"):
        ModelConfig("moesaic", 9, 8, GroupedQuery(1, 1, 8), Rope(8), (Layer(Reading(4)),))
