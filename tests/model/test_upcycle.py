"""A dense model made a mixture answers as before, unless noise was asked for."""

from __future__ import annotations

import pytest
import torch
import transformers

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.config import Experts
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.upcycle import Upcycle, upcycle
from moesaic.model.value_head import give_head
from tests.model import oracle

TOKENS = [[5, 9, 33, 21, 60, 12, 7], [4, 4, 8]]


def mixture(case: str, text: str, path) -> tuple[moesaic.Model, moesaic.Model]:
    oracle.save(case, path / "dense")
    upcycle(Checkpoint(path / "dense"), path / "mixture", Upcycle.parse(text), life=[])
    return moesaic.load(path / "dense"), moesaic.load(path / "mixture")


@pytest.mark.parametrize("case", ["llama-tied", "llama-yarn", "qwen3-window", "glm4"])
@pytest.mark.parametrize("text", ["experts=4,topk=2", "experts=4,topk=1", "experts=8,topk=4,split=2"])
def test_the_mixture_answers_as_the_dense_model(case, text, tmp_path):
    dense, mixed = mixture(case, text, tmp_path)
    wanted = Upcycle.parse(text)
    ffn = mixed.config.layers[0].ffn
    assert isinstance(ffn, Experts) and (ffn.count, ffn.per_token) == (wanted.experts, wanted.topk)
    for ours, before in zip(mixed.logits(TOKENS), dense.logits(TOKENS), strict=True):
        torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize(("case", "family"), [("llama-tied", "mixtral"), ("qwen3-tied", "qwen3_moe")])
def test_transformers_loads_the_mixture(case, family, tmp_path):
    dense, mixed = mixture(case, "experts=4,topk=2", tmp_path)
    assert mixed.config.family == family
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixture", experts_implementation="eager")
    logits = oracle.logits(theirs.eval(), TOKENS[0])
    torch.testing.assert_close(logits, dense.logits(TOKENS)[0], rtol=1e-3, atol=1e-4 * float(logits.abs().max()))


def test_noise_makes_the_experts_differ(tmp_path):
    dense, mixed = mixture("llama-tied", "experts=4,topk=2,perturb=0.1", tmp_path)
    experts = mixed.layers[0].ffn.gate_up_EGD
    assert not torch.equal(experts[0], experts[1])
    before = dense.layers[0].ffn.gate_up.weight
    share = ((experts[0] - before).std() / before.std()).item()
    assert 0.05 < share < 0.15
    assert not torch.allclose(mixed.logits(TOKENS)[0], dense.logits(TOKENS)[0], rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    oracle.save("llama-tied", tmp_path / "dense")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        settings = Upcycle(4, 2, perturb=0.1, seed=seed)
        upcycle(Checkpoint(tmp_path / "dense"), tmp_path / name, settings, life=[])
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("experts=4", "topk is missing"),
        ("experts=4,topk=8", "topk <= experts"),
        ("experts=4,topk=two", "not a number"),
        ("expert=4,topk=2", "no such key"),
        ("experts=4,topk=2,experts=8", "experts is there twice"),
        ("experts=6,topk=3,split=3", "does not divide"),
        ("experts=5,topk=2,split=2", "multiples of split"),
        ("experts=4,topk=2,perturb=-1", "perturb"),
        ("experts=100000,topk=2", "experts is at most 65,536, not 100,000"),
    ],
)
def test_wrong_settings_say_what_is_wrong(text, problem, tmp_path):
    oracle.save("llama-tied", tmp_path / "dense")
    with pytest.raises(UserError, match=problem):
        upcycle(Checkpoint(tmp_path / "dense"), tmp_path / "out", Upcycle.parse(text), life=[])
    assert not (tmp_path / "out").exists()


def test_a_mixture_is_not_upcycled_again(tmp_path):
    oracle.save("mixtral", tmp_path / "mixture")
    with pytest.raises(UserError, match="already"):
        upcycle(Checkpoint(tmp_path / "mixture"), tmp_path / "out", Upcycle(4, 2), life=[])


def test_nothing_is_asked_for(tmp_path, capsys):
    oracle.save("llama-tied", tmp_path / "dense")
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "out"), "--upcycle", ""]) == 2
    assert "no such key ''" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_value_head_stays(tmp_path):
    oracle.save("llama-tied", tmp_path / "plain")
    model = moesaic.load(tmp_path / "plain")
    torch.nn.init.normal_(give_head(model).weight)
    directory.save(model, tmp_path / "dense")
    upcycle(Checkpoint(tmp_path / "dense"), tmp_path / "mixture", Upcycle(4, 2), life=[])
    assert torch.equal(moesaic.load(tmp_path / "mixture").value.weight, model.value.weight)
