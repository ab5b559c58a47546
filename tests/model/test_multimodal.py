"""The language model of releases that see as well, beside `transformers`' whole models given text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.transformer import Model
from moesaic.report.model_summary import model_summary
from tests.compress.made import add_tokenizer
from tests.model.mixture_cases import LLAMA4, QWEN3_NEXT
from tests.model.oracle import QWEN_MOE, SMALL
from tests.model.test_parity import close, greedy, ragged

EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48}
QWEN_EYES = EYES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
TURNS = {"rope_type": "default", "rope_theta": 700.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
FEWER = TURNS | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
LLAMA_EYES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8,
    "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip
# Model type, what it is read as, its text model, its encoder.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_moe", QWEN_MOE | {"rope_parameters": TURNS}, QWEN_EYES),
    "qwen3_vl_moe-dense-layer": (
        "qwen3_vl_moe",
        "qwen3_moe",
        QWEN_MOE | {"rope_parameters": TURNS, "mlp_only_layers": [0], "attention_bias": True, "num_experts_per_tok": 1},
        QWEN_EYES,
    ),
    "qwen3_vl": ("qwen3_vl", "qwen3", QWEN_MOE | {"rope_parameters": TURNS}, QWEN_EYES),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text", QWEN3_NEXT | {"rope_parameters": FEWER}, EYES),
    "llama4": ("llama4", "llama4_text", LLAMA4, LLAMA_EYES),
}


def made(case: str, **more: Any) -> transformers.PreTrainedModel:
    kind, _, text, eyes = CASES[case]
    config = transformers.AutoConfig.for_model(kind, text_config=SMALL | text | more, vision_config=eyes)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.3) if float(tensor.abs().max()) == 0 else None  # routers begin with nothing
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> tuple[transformers.PreTrainedModel, Model, Path, str]:
    path = tmp_path_factory.mktemp(request.param)
    theirs = made(request.param)
    theirs.save_pretrained(path)
    return theirs, moesaic.load(path), path, CASES[request.param][1]


def test_logits_and_greedy_text_are_those_of_the_whole_model(pair) -> None:
    theirs, ours, _, family = pair
    assert ours.config.family == family
    batch = ragged(ours.config.vocab)
    with torch.no_grad():
        for tokens, logits in zip(batch, ours.logits(batch), strict=True):
            close(logits, theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0])
        prompt, text = batch[3], list(batch[3])
        for _ in range(8):
            text.append(int(theirs(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert greedy(ours, prompt, 8) == text


def test_it_is_kept_as_a_language_model(pair, tmp_path: Path) -> None:
    _, ours, path, family = pair
    directory.save(ours, tmp_path / "text")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert again.config.model_type == family
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = ragged(ours.config.vocab)[2]
    with torch.no_grad():
        close(again.eval()(torch.tensor([tokens]), use_cache=False).logits[0], ours.logits([tokens])[0])
    assert main(["convert", str(path), str(tmp_path / "converted")]) == 0
    read = moesaic.load(tmp_path / "converted")
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), ours.parameters(), strict=True))


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    made("qwen3_vl_moe", vocab_size=320, max_position_embeddings=256).save_pretrained(tmp_path / "seeing")
    return tmp_path / "seeing"


def test_experts_as_released_lie_with_inputs_first(seeing: Path) -> None:
    before = moesaic.load(seeing)
    file = seeing / "model.safetensors"
    tensors = load_file(file)
    turned = {name: one.transpose(1, 2).contiguous() if "experts." in name else one for name, one in tensors.items()}
    assert any(turned[name].shape != tensors[name].shape for name in tensors)
    save_file(turned, file)
    ours = moesaic.load(seeing)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), before.parameters(), strict=True))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(seeing).eval()
    tokens = ragged(ours.config.vocab)[0]
    with torch.no_grad():
        close(ours.logits([tokens])[0], theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0])


def test_it_is_shown_and_compressed_without_what_is_beside_it(seeing: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(seeing)
    text = sum(one.numel() for name, one in theirs.named_parameters() if "visual" not in name)
    assert sum(one.numel() for one in theirs.parameters()) > text
    told = model_summary(seeing)
    assert told["parameters"] == text and told["bits_per_weight"] == 32.0
    add_tokenizer(seeing)
    assert (
        main(["compress", str(seeing), "--method", "rtn", "--out", str(tmp_path / "small"), "bits=8", "group=0"]) == 0
    )
    found, wanted = (moesaic.load(place).logits([[5, 6, 7, 8]])[0] for place in (tmp_path / "small", seeing))
    assert (found - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_type": "qwen3_omni_moe"}, "'qwen3_omni_moe' takes more than text.*qwen3_vl_moe"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints of qwen3_vl_moe"),
        ({"text_config": 3}, "text_config: must be a mapping"),
    ],
)
def test_what_is_not_read_is_said(seeing: Path, changed: dict[str, object], told: str) -> None:
    raw = json.loads((seeing / "config.json").read_text())
    (seeing / "config.json").write_text(json.dumps(raw | changed))
    with pytest.raises(UserError, match=told):
        moesaic.load(seeing)


def test_tensors_of_another_part_are_named(seeing: Path) -> None:
    file = seeing / "model.safetensors"
    save_file(load_file(file) | {"model.ears.weight": torch.ones(3)}, file)
    with pytest.raises(UserError, match=r"1 tensor extra: model\.ears\.weight"):
        moesaic.load(seeing)
