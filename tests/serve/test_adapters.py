"""Adapters made by `peft` give here what they give there, alone and side by side."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.request import Sampling
from tests.model import oracle
from tests.serve.tiny import serve_all

TARGETS = {
    "qwen3_moe-normalised-mixed": ["q_proj", "v_proj", "o_proj"],
    "qwen3-yarn-biases": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "deepseek_v3-yarn": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


def make_adapter(case, base, path, seed: int, rank: int = 3, **settings):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=7, target_modules=TARGETS[case], init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    theirs.save_pretrained(path)
    return theirs.eval()


@pytest.fixture(scope="module", params=TARGETS)
def world(request, tmp_path_factory):
    """A model, two adapters of it, and greedy answers of peft's own models."""
    case = request.param
    path = tmp_path_factory.mktemp(case)
    base = oracle.save(case, path / "base")
    asked = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(5)).tolist()
    answers = {None: [greedy(base, prompt) for prompt in asked]}
    for number, settings in enumerate(({}, {"use_rslora": True})):
        name = f"adapter{number}"
        theirs = make_adapter(case, oracle.make(case), path / name, number, rank=3 + number, **settings)
        answers[name] = [greedy(theirs.get_base_model(), prompt) for prompt in asked]
    return path, asked, answers


def greedy(model, prompt: list[int], count: int = 8) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle.logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_each_adapter_answers_as_in_peft_alone_and_together(world):
    path, asked, answers = world
    engine = moesaic.Engine(moesaic.load(path / "base"), page_size=4)
    for name in ("adapter0", "adapter1"):
        engine.load_adapter(name, path / name)
    assert len({str(found) for found in answers.values()}) == 3, "the adapters change nothing"
    wishes = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    requests = {
        (name, place): engine.request(prompt, wishes, adapter=name)
        for place, prompt in enumerate(asked)
        for name in answers
    }
    serve_all(engine, requests.values())
    for (name, place), request in requests.items():
        assert request.tokens[9:] == answers[name][place], name
    for name, found in answers.items():
        alone = engine.generate(asked, adapter=name, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert [answer.tokens for answer in alone] == found


def test_an_adapter_can_go_while_it_is_used(world):
    path, asked, answers = world
    engine = moesaic.Engine(moesaic.load(path / "base"))
    engine.load_adapter("mine", path / "adapter0")
    request = engine.request(asked[0], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True), adapter="mine")
    engine.add(request)
    engine.step()
    engine.unload_adapter("mine")
    while engine.working:
        engine.step()
    assert request.tokens[9:] == answers["adapter0"][0]
    with pytest.raises(UserError, match="there is no 'mine'"):
        engine.request(asked[0], adapter="mine")
    with pytest.raises(UserError, match="there is no 'mine'"):
        engine.unload_adapter("mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "adapter_config.json").unlink(), "no such file. Give the directory of a LoRA adapter"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "is not JSON.*Copy the adapter again"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "cannot be read"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"x" * 40), "adapter_model.safetensors"),
        (lambda path: edit(path, peft_type="IA3"), "does not describe a LoRA"),
        (lambda path: edit(path, use_dora=True), "use_dora is not supported"),
        (lambda path: edit(path, lora_bias=True), "lora_bias is not supported"),
        (lambda path: edit(path, bias="all"), "biases"),
        (lambda path: edit(path, lora_alpha="x"), "lora_alpha"),
        (lambda path: edit(path, lora_alpha=float("inf")), "lora_alpha"),
        (lambda path: edit(path, r=5), "has rank 3, and adapter_config.json says 5"),
        (lambda path: edit(path, r=None), "r, the rank, is missing"),
        (lambda path: edit(path, rank_pattern={"q_proj": 9}), "q_proj has rank 3, and adapter_config.json says 9"),
        (lambda path: edit(path, target_modules=["q_proj"]), "none of adapter_config.json's target_modules"),
        (lambda path: edit(path, target_modules=".*q_proj"), "none of adapter_config.json's target_modules"),
        (lambda path: edit(path, target_modules="("), "is no pattern"),
        (lambda path: edit(path, target_modules=None), "target_modules is missing"),
        (lambda path: leave_out(path, "k_proj"), "holds no correction of k_proj"),
    ],
)
def test_a_bad_adapter_is_refused_and_changes_nothing(tmp_path, change, message):
    case = "qwen3-yarn-biases"
    base = oracle.save(case, tmp_path / "base")
    make_adapter(case, base, tmp_path / "adapter", 0)
    change(tmp_path / "adapter")
    engine = moesaic.Engine(moesaic.load(tmp_path / "base"))
    with pytest.raises(UserError, match=message):
        engine.load_adapter("mine", tmp_path / "adapter")
    assert not engine.adapters


def test_an_adapter_of_another_model_is_refused(tmp_path):
    oracle.save("deepseek_v3-yarn", tmp_path / "base")
    make_adapter("qwen3-yarn-biases", oracle.make("qwen3-yarn-biases"), tmp_path / "adapter", 0)
    engine = moesaic.Engine(moesaic.load(tmp_path / "base"))
    with pytest.raises(UserError, match="no such matrix of this model|do not correct"):
        engine.load_adapter("mine", tmp_path / "adapter")


def leave_out(path, module: str) -> None:
    file = path / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if module not in name}, file)


def edit(path, **settings) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
