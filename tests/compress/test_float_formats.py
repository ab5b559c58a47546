"""FP8, MXFP4, NVFP4 and GLM's integers, written here and read by others, and the other way round.

pytest tests/compress/test_float_formats.py
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.float_rounding import gptq_floats
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.directory import load, open_source
from moesaic.model.formats import float4
from moesaic.model.formats.float_matrix import FLOAT_FORMATS, rounded
from tests.compress.made import make

IDS = [[5, 9, 200, 31, 8, 77, 123, 4, 90, 17, 55, 300]]
FORMATS = list(FLOAT_FORMATS)
WISH: dict[str, Any] = {"samples": 2, "length": 64, "check_tokens": 0}


def made(path: Path, out: Path, method: str, options: dict[str, Any], layout: str | None = None) -> Path:
    compressor = build(Method(method, options), Compressor, "test")  # type: ignore[type-abstract]
    compress(path, compressor, out, CompressionRequest(**WISH, layout=layout))
    return out


def decompressed(out: Path) -> dict[str, torch.Tensor]:
    """Every quantized matrix as the package compressed-tensors has it."""
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    [group] = config["quantization_config"]["config_groups"].values()
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    scheme = QuantizationScheme.model_validate(group)
    found = {}
    for module in {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}:
        state = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
        found[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_package_decompresses_the_same_values_to_the_bit(kind: str, form: str, tmp_path: Path) -> None:
    out = made(make(tmp_path / "model", kind), tmp_path / "out", "rtn", {"format": form})
    source, theirs = open_source(out), decompressed(out)
    assert len(theirs) == (2 * 7 if kind == "llama" else 2 * (4 + 4 * 3))
    for name, weight in theirs.items():
        assert torch.equal(source.tensor(name).to(weight.dtype), weight), name


@pytest.mark.parametrize(
    ("kind", "form"),
    [("llama", form) for form in ("fp8_channel", "mxfp4", "nvfp4")]
    + [("qwen3_moe", form) for form in ("fp8_tensor", "fp8_block")],
)
def test_transformers_reads_it_and_agrees(kind: str, form: str, tmp_path: Path) -> None:
    out = made(make(tmp_path / "model", kind), tmp_path / "out", "rtn", {"format": form})
    four = FLOAT_FORMATS[form].bits == 4  # the package decompresses these to bfloat16
    dtype = torch.bfloat16 if four else torch.float32
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
    with torch.no_grad():
        theirs = theirs_model(torch.tensor(IDS)).logits[0].float()
    ours = load(out).logits(IDS)[0]
    assert (ours - theirs).norm() / theirs.norm() < (3e-2 if four else 1e-4)


def test_transformers_reads_deepseeks_layout(tmp_path: Path) -> None:
    """It takes whole blocks only."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 2}
    path = make(tmp_path / "model", "qwen3_moe", **sizes)
    out = made(path, tmp_path / "out", "rtn", {"format": "fp8_block"}, "fp8")
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"].shape == (1, 2)
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    ).eval()
    with torch.no_grad():
        theirs = theirs_model(torch.tensor(IDS)).logits[0]
    ours = load(out).logits(IDS)[0]
    assert (ours - theirs).norm() / theirs.norm() < 1e-4


@pytest.mark.parametrize("form", ["fp8_channel", "fp8_block", "mxfp4", "nvfp4"])
def test_what_the_package_compressed_is_read_to_the_bit(form: str, tmp_path: Path) -> None:
    """Scales as simple observers make them, codes and layout by the package itself."""
    out = made(make(tmp_path / "model", "llama"), tmp_path / "out", "rtn", {"format": form})
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    [group] = config["quantization_config"]["config_groups"].values()
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    scheme = QuantizationScheme.model_validate(group)
    torch.manual_seed(1)
    wanted = {}
    for module in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}):
        state = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
        plain = dict(compressor.decompress(dict(state), scheme))
        plain["weight"] = (plain["weight"].float() * (1 + 0.1 * torch.randn(plain["weight"].shape))).bfloat16()
        plain["weight_scale"] = plain["weight_scale"].float()
        if FLOAT_FORMATS[form].bits == 8:
            plain["weight_scale"] = state["weight_scale"]
        packed = compressor.compress(plain, scheme)
        tensors |= {f"{module}.{name}": t.contiguous() for name, t in packed.items()}
        wanted[f"{module}.weight"] = compressor.decompress(dict(packed), scheme)["weight"]
    save_file({name: t.detach().clone() for name, t in tensors.items()}, out / "model.safetensors")
    source = open_source(out)
    for name, weight in wanted.items():
        assert torch.equal(source.tensor(name).to(weight.dtype), weight), name


@cache
def problem() -> tuple[torch.Tensor, InputStatistics, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(64, 64, generator=generator)
    rows = torch.randn(512, 64, generator=generator) @ mixing
    return torch.randn(48, 64, generator=generator), InputStatistics(rows[:256]), rows[256:]


@pytest.mark.parametrize("form", FORMATS)
def test_gptq_loses_less_at_the_output_than_rounding(form: str) -> None:
    weight_OI, statistics, others_TI = problem()
    plain = rounded(form, weight_OI).dense()
    better = gptq_floats(form, weight_OI, statistics, [slice(None)]).dense()

    def loss(made_OI: torch.Tensor) -> float:
        return float((others_TI @ (made_OI - weight_OI).T).square().sum())

    assert loss(better) < 0.7 * loss(plain)


@pytest.mark.parametrize(("form", "worse"), [("nvfp4", 1.02), ("mxfp4", 1.02)])
def test_scales_are_searched_for(form: str, worse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI = problem()[0] ** 3
    found = (rounded(form, weight_OI).dense() - weight_OI).square().sum()
    monkeypatch.setattr("moesaic.model.formats.float_matrix._least", lambda grouped, counted, tried, *rest: tried[0])
    assert (rounded(form, weight_OI).dense() - weight_OI).square().sum() > worse * found


def test_four_bit_numbers() -> None:
    every = float4.numbers(torch.arange(16, dtype=torch.uint8))
    assert sorted(set(every.abs().tolist())) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(float4.numbers(float4.nearest(every)), every + 0.0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert float4.numbers(float4.nearest(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    stored = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(float4.exponents(float4.powers(stored)), stored)


def test_mxfp4_is_served_as_integers(tmp_path: Path) -> None:
    out = made(make(tmp_path / "model"), tmp_path / "out", "rtn", {"format": "mxfp4"})
    model = load(out)
    assert model.quantized
    qkv = model.layers[0].attention.qkv.weight
    assert (qkv.bits, qkv.group) == (5, 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_glm_integers(bits: int, tmp_path: Path) -> None:
    """Two of them in a byte, the first in the high bits, as GLM-130B's tools extract them."""
    path = make(tmp_path / "model", "glm4", pad_token_id=0)
    out = made(path, tmp_path / "out", "gptq", {"bits": bits, "group": 0, "symmetric": True}, "glm-int")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["quantization_bit"] == bits and "quantization_config" not in config
    name = "model.layers.0.self_attn.q_proj"
    stored, scale_O = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    assert (stored.dtype, scale_O.dtype, scale_O.dim()) == (torch.int8, torch.float16, 1)
    integers = stored.int()
    if bits == 4:
        low = (integers & 15) - 16 * ((integers & 15) > 7)
        integers = torch.stack([integers >> 4, low], -1).flatten(1)
    theirs = integers * scale_O.float()[:, None]
    assert torch.equal(open_source(out).tensor(f"{name}.weight").float(), theirs.half().float())
    model, plain = load(out), load(path)
    assert model.quantized
    off = (model.logits(IDS)[0] - plain.logits(IDS)[0]).norm() / plain.logits(IDS)[0].norm()
    assert 1e-4 < off < (0.5 if bits == 4 else 0.05)


@pytest.mark.parametrize(
    ("options", "layout", "problem"),
    [
        ({"format": "mxfp4"}, "moesaic", "cannot be kept in moesaic"),
        ({"format": "nvfp4"}, "fp8", "cannot be kept in fp8"),
        ({"bits": 4, "group": 64}, "glm-int", "cannot be kept in glm-int"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    options: dict[str, Any], layout: str, problem: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "model", "llama")
    with pytest.raises(UserError, match=problem):
        made(path, tmp_path / "out", "rtn", options, layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_inputs_that_are_no_whole_groups_are_refused(form: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", "llama", intermediate_size=100)
    with pytest.raises(UserError, match="inputs"):
        made(path, tmp_path / "out", "rtn", {"format": form})


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_a_damaged_checkpoint_is_said_to_be_so(form: str, tmp_path: Path) -> None:
    out = made(make(tmp_path / "model", "llama"), tmp_path / "out", "rtn", {"format": form})
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    save_file(tensors | {name: tensors[name][:, :1].contiguous()}, out / "model.safetensors")
    with pytest.raises(UserError, match="down_proj"):
        load(out)
