"""Compressed checkpoints as others read them: `transformers` with compressed-tensors, logits beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.directory import convert, load, open_source, save
from moesaic.model.value_head import give_head
from tests.compress.made import make

IDS = [[5, 9, 200, 31, 8, 77, 123, 4, 90, 17, 55, 300]]


# `transformers` itself joins the experts of a mixture from packed, symmetric codes alone.
DENSE: list[tuple[str, dict[str, Any], float]] = [
    ("rtn", {"bits": 4, "group": 32, "symmetric": False}, 2e-3),
    ("zeroquant", {"bits": 8, "group": 0, "steps": 0}, 2e-2),
]
EITHER: list[tuple[str, dict[str, Any], float]] = [
    ("rtn", {"bits": 4, "group": 32}, 2e-3),
    ("gptq", {"bits": 4, "group": 32, "symmetric": True}, 2e-3),
    ("rtn", {"bits": 4, "group": 0}, 2e-3),
    ("rtn", {"bits": 8, "group": 0}, 2e-3),
    ("zeroquant", {"bits": 4, "group": 32, "steps": 0}, 2e-2),
]


@pytest.mark.parametrize(
    "kind, method, options, off",
    [("llama", *case) for case in DENSE + EITHER] + [("qwen3_moe", *case) for case in EITHER],
)
def test_transformers_reads_it_and_agrees(
    kind: str, method: str, options: dict[str, Any], off: float, tmp_path: Path
) -> None:
    path = make(tmp_path / "model", kind)
    made = build(Method(method, options), Compressor, "test")  # type: ignore[type-abstract]
    wish = CompressionRequest(samples=2, length=64, check_tokens=0, layout="compressed-tensors")
    compress(path, made, tmp_path / "out", wish)
    ours = load(tmp_path / "out").logits(IDS)[0]
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = theirs_model(torch.tensor(IDS)).logits[0]
    assert (ours - theirs).norm() / theirs.norm() < off
    plain = load(path).logits(IDS)[0]
    assert (theirs - plain).norm() / plain.norm() > 2e-3  # it was rounded at all


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda weights, tensors: weights.update(symmetric=False), "1 tensor missing: .*weight_zero_point"),
        (lambda weights, tensors: tensors.update(_as(tensors, torch.uint8)), "not packed in words of 32 bits"),
        (lambda weights, tensors: tensors.update(_as(tensors, torch.float32)), "not packed in words of 32 bits"),
        (None, "the target 're:\\(' is no pattern"),
    ],
)
def test_what_cannot_be_read_is_said(spoil: Any, problem: str, tmp_path: Path) -> None:
    method = build(Method("rtn", {"bits": 4, "group": 32}), Compressor, "test")  # type: ignore[type-abstract]
    out = tmp_path / "out"
    compress(
        make(tmp_path / "model", "llama"), method, out, CompressionRequest(check_tokens=0, layout="compressed-tensors")
    )
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    [group] = config["quantization_config"]["config_groups"].values()
    if spoil is None:
        group["targets"] = ["re:("]
    else:
        spoil(group["weights"], tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=problem):
        load(out)


def _as(tensors: dict[str, torch.Tensor], kind: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: words.to(kind) for name, words in tensors.items() if name.endswith("weight_packed")}


def test_a_value_head_stays_beside_the_weights(tmp_path: Path) -> None:
    model = load(make(tmp_path / "plain"))
    head = give_head(model)
    torch.nn.init.normal_(head.weight)
    save(model, tmp_path / "critic", files={})
    method = build(Method("rtn", {"bits": 8}), Compressor, "test")  # type: ignore[type-abstract]
    compress(tmp_path / "critic", method, tmp_path / "small", CompressionRequest(check_tokens=0))
    convert(open_source(tmp_path / "small"), tmp_path / "again", life=[])
    for name in ("small", "again"):
        kept = load(tmp_path / name).value
        assert kept is not None and torch.equal(kept.weight, head.weight)
