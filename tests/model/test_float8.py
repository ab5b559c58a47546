"""Checkpoints of 8-bit numbers with scales are read as the weights they stand for, as `transformers` reads them.

pytest tests/model/test_float8.py
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from tests.model.oracle import MLA, QWEN_MOE, SMALL

TOKENS = [[5, 17, 96, 3, 42, 7, 64, 12]]
SIZES = {"hidden_size": 160, "moe_intermediate_size": 136}
KINDS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **QWEN_MOE | SIZES),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SMALL, **MLA | SIZES, num_nextn_predict_layers=0, n_group=1, topk_group=1
    ),
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias", "correction")


def blocks(matrix: torch.Tensor, high: int, wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scale for each block, block by block."""
    rows, columns = matrix.shape
    codes = torch.zeros_like(matrix)
    scales = torch.zeros(-(-rows // high), -(-columns // wide))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = matrix[at].abs().max() / 448
            codes[at] = matrix[at] / scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales


def separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One matrix for each expert, as published checkpoints have them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, own in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = own.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, own in enumerate(tensor):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = own.contiguous()
        else:
            found[name] = tensor
    return found


def matrices(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.dim() == 2 and not any(part in name for part in PLAIN)]


@pytest.fixture(scope="module", params=KINDS)
def original(request, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForCausalLM.from_config(KINDS[request.param], dtype=torch.bfloat16).save_pretrained(made)
    save_file(separate(load_file(made / "model.safetensors")), made / "model.safetensors", {"format": "pt"})
    return made


def rewritten(original: Path, to: Path, tensors: dict[str, torch.Tensor], settings: dict | None) -> Path:
    to.mkdir()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | ({"quantization_config": settings} if settings else {})))
    return to


def in_blocks(original: Path, to: Path, size: int = 128) -> Path:
    tensors = load_file(original / "model.safetensors")
    for name in matrices(tensors):
        tensors[name], tensors[f"{name}_scale_inv"] = blocks(tensors[name].float(), size, size)
    return rewritten(original, to, tensors, FP8 | {"weight_block_size": [size, size]})


def logits(directory: Path) -> torch.Tensor:
    return moesaic.load(directory, dtype=torch.float32, device="cpu").logits(TOKENS)[0]


def test_blocks_as_transformers_reads_them(original, tmp_path):
    given = in_blocks(original, tmp_path / "fp8", 4)  # it reads whole blocks only
    found = logits(given)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        given, dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    ).float()
    with torch.no_grad():
        wanted = peer(torch.tensor(TOKENS)).logits[0]
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (found - logits(original)).abs().max() > 1e-3 * wanted.abs().max(), "it was rounded"


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_the_compressed_tensors_layout(original, tmp_path, strategy):
    tensors = load_file(original / "model.safetensors")
    expected = dict(tensors)
    for name in matrices(tensors):
        rows, columns = tensors[name].shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (64, 32)}[strategy]
        codes, scale = blocks(tensors[name].float(), high, wide)
        whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        expected[name] = (codes.float() * whole).to(torch.bfloat16)
        tensors[name] = codes
        tensors[f"{name}_scale"] = scale.reshape(()) if strategy == "tensor" else scale
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.5)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [64, 32]
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
    }
    given = rewritten(original, tmp_path / "given", tensors, settings)
    assert torch.equal(logits(given), logits(rewritten(original, tmp_path / "plain", expected, None)))


def test_converted_it_is_plain(original, tmp_path):
    given = in_blocks(original, tmp_path / "fp8")
    assert main(["convert", str(given), str(tmp_path / "plain")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(tmp_path / "plain" / "model.safetensors").values()} <= {
        torch.bfloat16,
        torch.float32,
    }
    assert torch.equal(logits(tmp_path / "plain"), logits(given))


def without_a_scale(tensors, settings):
    tensors.pop(next(name for name in tensors if name.endswith("_scale_inv")))


def a_scale_too_many(tensors, settings):
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors[name] = torch.ones(7, 3)


def another_form(tensors, settings):
    settings["fmt"] = "e5m2"


def odd_blocks(tensors, settings):
    settings["weight_block_size"] = [128]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_a_scale, "has no scale"),
        (a_scale_too_many, "does not fit its weights"),
        (another_form, "e5m2"),
        (odd_blocks, "blocks of"),
    ],
)
def test_what_cannot_be_read_is_said(original, tmp_path, spoil, words):
    given = in_blocks(original, tmp_path / "fp8")
    tensors, settings = load_file(given / "model.safetensors"), dict(FP8)
    spoil(tensors, settings)
    with pytest.raises(UserError, match=words):
        moesaic.load(rewritten(original, tmp_path / "spoiled", tensors, settings), device="cpu")
