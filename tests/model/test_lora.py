"""Adapters that are trained, on families of every kind: `peft` reads them, and every forward has their bits."""

from __future__ import annotations

import json

import peft
import pytest
import torch

import moesaic
from moesaic.model import directory
from moesaic.model.layout import Layout
from moesaic.model.lora import FOLDER, Lora, adaptable, target
from tests.model import oracle

LATENT, DENSE = ["kv_a_proj_with_mqa", "o_proj", "q_a_proj", "q_b_proj"], ["down_proj", "gate_proj", "up_proj"]
CASES = {  # what is chosen by default, and what may be chosen beyond that
    "qwen3_moe-normalised-mixed": (["k_proj", "o_proj", "q_proj", "v_proj"], DENSE),
    "qwen3-yarn-biases": (["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"], []),
    "deepseek_v3-yarn": (LATENT, DENSE),
}
PROMPTS = [[3, 50, 9, 33, 7, 60, 71], [90, 4, 4, 51]]


@pytest.fixture(scope="module", params=[*CASES, "deepseek_v3-yarn beyond"])
def made(request, tmp_path_factory):
    """A base, the same model with an adapter that changes it, and the directory that this was written to."""
    case, _, beyond = request.param.partition(" ")
    path = tmp_path_factory.mktemp(case)
    oracle.save(case, path / "base")
    model = moesaic.load(path / "base", mode="invariant")
    usual, more = CASES[case]
    assert {target(place) for parts in adaptable(model).values() for place in parts} == {*usual, *more}
    model.lora = Lora(model, 3, 7.0, more if beyond else ())
    with torch.no_grad():
        for number, parameter in enumerate(model.lora.parameters()):
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    weights = model.state_dict()
    files = dict(model.tokenizer.files) if model.tokenizer else {}
    files |= model.lora.files(weights, str(path / "base"), [])
    merged = model.lora.merged(weights)
    directory.write(
        path / "out",
        model.config,
        lambda place: merged[place.parameter][place.part] if place.part else merged[place.parameter],
        torch.float32,
        files,
        [],
    )
    settings = json.loads((path / "out" / FOLDER / "adapter_config.json").read_text())
    assert settings["target_modules"] == (more if beyond else usual)
    return None if beyond else case, path, model


def test_peft_the_engine_and_the_merged_model_agree(made):
    case, path, model = made
    stored = moesaic.load(path / "out")
    plain, found, merged = (torch.cat(one.logits(PROMPTS)) for one in (model.beside(None), model, stored))
    assert (found - plain).abs().max() > 0.1
    torch.testing.assert_close(merged, found, rtol=1e-4, atol=1e-4)
    if case is not None:
        theirs = peft.PeftModel.from_pretrained(oracle.make(case), path / "out" / FOLDER).eval()
        with torch.no_grad():
            expected = torch.cat([theirs(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    engine = moesaic.Engine(moesaic.load(path / "base"))
    engine.load_adapter("mine", path / "out" / FOLDER)
    wishes = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    served = engine.generate(PROMPTS, adapter="mine", **wishes)
    assert [a.tokens for a in served] == [a.tokens for a in moesaic.Engine(model).generate(PROMPTS, **wishes)]


def test_what_the_engine_records_is_to_the_bit_what_learning_computes(made):
    _, _, model = made
    answers = moesaic.Engine(model).generate(PROMPTS, max_tokens=6, temperature=1.0, ignore_eos=True, logprobs=0)
    said = [prompt + answer.tokens for prompt, answer in zip(PROMPTS, answers, strict=True)]
    tokens_T, targets_T = (torch.tensor([t for one in said for t in part(one)]) for part in (lambda s: s, after))
    hidden_TD = model(tokens_T, Layout([len(one) for one in said]))
    logprobs_T, _ = model.token_logprobs(hidden_TD, targets_T)
    logprobs_T.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.lora.parameters())
    assert all(p.grad is None for name, p in model.named_parameters() if not name.startswith("lora."))
    for prompt, answer, found in zip(PROMPTS, answers, logprobs_T.split([len(one) for one in said]), strict=True):
        recorded = [entry.logprob for entry in answer.logprobs]
        assert found[len(prompt) - 1 : -1].tolist() == recorded


def after(tokens: list[int]) -> list[int]:
    return [*tokens[1:], 0]
