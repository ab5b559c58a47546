"""What every family goes through beside parity: shown, planned, converted, compressed, served and trained."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch.nn import functional as F

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.families import read_config, write_config
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.models import load_model
from moesaic.recipe_sections import ModelSection, RouterSection
from moesaic.serve.group.shares import check as check_layout
from moesaic.serve.offload.loading import load_served
from moesaic.train.architecture import architecture
from tests.compress.made import add_tokenizer
from tests.model import oracle

# The newer ones; those before have tests of their own in every room.
SIGMOID, BALANCED = {"llama4_text", "minimax_m2", "dots1"}, {"minimax_m2", "dots1"}
NORMED = {"llama4_text", "olmoe", "minimax_m2", "hunyuan_v1_moe", "dots1", "qwen3_next"}
SHARED = {"llama4_text", "qwen2_moe", "hunyuan_v1_moe", "dots1", "qwen3_next"}
CASES = ["gpt_oss", "llama4_text", "qwen2_moe", "olmoe", "minimax_m2", "hunyuan_v1_moe", "dots1", "qwen3_next"]
TOKENS = [5, 17, 3, 90, 41, 41, 8, 22, 63, 7, 11]


@pytest.fixture(scope="module", params=CASES)
def stored(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "model"
    settings = {"vocab_size": 320, "max_position_embeddings": 256}
    oracle.save(request.param, path, **settings)
    add_tokenizer(path)
    return path


def test_shown_and_planned(stored, capsys):
    assert main(["show", str(stored), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    model = moesaic.load(stored)
    assert shown["parameters"] == sum(p.numel() for p in model.parameters())
    assert main(["plan", "--model", str(stored), "--cluster", "2xH200", "--serve", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    planned = load_model(str(stored)).parameters  # without norms, and biases of experts
    assert planned == pytest.approx(shown["parameters"], rel=0.02)
    assert main(["convert", str(stored), str(stored) + "-up", "--upcycle", "experts=4,topk=2"]) == 2
    assert "is a mixture of experts already" in capsys.readouterr().err


def test_converted_keeps_every_bit(stored, tmp_path):
    assert main(["convert", str(stored), str(tmp_path / "again")]) == 0
    before, after = moesaic.load(stored), moesaic.load(tmp_path / "again")
    assert after.config == before.config
    for (name, a), (_, b) in zip(before.state_dict().items(), after.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_compressed_to_8_bits_and_served(stored, method, tmp_path):
    out = tmp_path / method
    options = ["--samples", "2", "--length", "64", "bits=8", "group=32"]
    assert main(["compress", str(stored), "--method", method, "--out", str(out), *options]) == 0
    plain, compressed = moesaic.load(stored), moesaic.load(out)
    quantized = {name: part for name, part in compressed.named_modules() if isinstance(part, QuantizedMatrix)}
    assert sum(part.numel() for part in quantized.values()) > 0.5 * sum(p.numel() for p in plain.parameters())
    for name, part in quantized.items():
        *above, last = name.split(".")
        weight = plain.get_parameter(".".join(above))[int(last)] if last.isdigit() else plain.get_parameter(name)
        assert (part.dense() - weight).norm() < 0.02 * weight.norm(), name
    meant = moesaic.load(out, mode="reference").logits([TOKENS])[0]
    assert (compressed.logits([TOKENS])[0] - meant).norm() < 0.01 * meant.norm()
    engine = moesaic.Engine(compressed)
    assert len(engine.generate([TOKENS], max_tokens=4, ignore_eos=True)[0].tokens) == 4


def test_engine_records_the_trainers_bits(stored):
    """Whatever else is in the batch, and however prompts are cut."""
    model = moesaic.load(stored, threads=1, mode="invariant")
    engine = moesaic.Engine(model, page_size=4)
    asked = [TOKENS, TOKENS[:4], TOKENS[::-1] * 2]
    answers = engine.generate(asked, max_tokens=7, seed=3, logprobs=1, ignore_eos=True)
    for prompt, answer in zip(asked, answers, strict=True):
        tokens = torch.tensor(prompt + answer.tokens)
        hidden_TD = model(tokens, Layout([len(tokens)]))
        assert hidden_TD.requires_grad
        logprobs, _ = model.token_logprobs(hidden_TD[len(prompt) - 1 : -1], tokens[len(prompt) :])
        assert [entry.logprob for entry in answer.logprobs] == logprobs.tolist()


def test_begins_from_scratch(stored):
    """As a recipe asks for it, and `transformers` knows the keys that are written."""
    family = json.loads((stored / "config.json").read_text())["model_type"]
    router = {"score": "sigmoid" if family in SIGMOID else "softmax", "correction": family in BALANCED}
    router["normalize"] = family != "llama4_text"
    section = ModelSection(
        family=family, vocab=97, hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, dense_layers=0, experts=4,
        experts_per_token=1 if family == "llama4_text" else 2, expert_hidden=32, qk_norm=family in NORMED,
        shared_experts=int(family in SHARED), router=RouterSection(**router),
    )  # fmt: skip
    config = architecture(section, bos=1, eos=(2,), pad=None)
    model = Model(config).initialize(3)
    assert torch.isfinite(model.logits([TOKENS])[0]).all()
    theirs = transformers.AutoConfig.for_model(**write_config(config)[1])
    assert read_config(theirs.to_dict(), "config.json") == config


def test_offloaded_experts_are_the_same(stored):
    """However a family has them on disk."""
    whole = moesaic.load(stored)
    if whole.config.family == "gpt_oss":
        with pytest.raises(UserError, match="experts with biases"):
            load_served(stored, offload="experts", offload_from="disk")
        return
    offloaded = load_served(stored, offload="experts", offload_from="disk")
    torch.testing.assert_close(offloaded.logits([TOKENS])[0], whole.logits([TOKENS])[0], rtol=1e-4, atol=1e-4)


def test_what_one_device_computes_is_not_divided(stored):
    config = moesaic.load(stored).config
    layout = ParallelLayout(tp=2)
    if config.family == "dots1":
        check_layout(config, layout)
        return
    with pytest.raises(UserError, match="one device|learned sinks"):
        check_layout(config, layout)


def test_learns(stored):
    model = moesaic.load(stored)
    tokens = torch.tensor(TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        logits_TV = model.logits_at(model(tokens, Layout([len(tokens)])), slice(0, -1))
        loss = F.cross_entropy(logits_TV, tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert not unused
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
