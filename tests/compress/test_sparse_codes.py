"""N:M codes on disk: there and back, smaller, and an error where a mask is not what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.directory import load
from moesaic.model.formats.sparse import filled, kept_inputs, thinned
from tests.compress.made import make


@pytest.mark.parametrize("n, m, inputs, bits", [(2, 4, 64, 4), (1, 4, 70, 3), (3, 8, 45, 8), (2, 4, 33, 2)])
def test_there_and_back(n: int, m: int, inputs: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    middle = 2 ** (bits - 1)
    codes_OI = torch.full((9, inputs), middle, dtype=torch.uint8)
    for start in range(0, inputs, m):
        for row in range(9):
            places = torch.randperm(min(m, inputs - start), generator=generator)[: n - row % 2] + start
            codes_OI[row, places] = torch.randint(0, 2**bits, (len(places),), generator=generator, dtype=torch.uint8)
    packed, mask = thinned(codes_OI, bits, n, m)
    assert packed.shape[1] <= (kept_inputs(inputs, n, m) + 31) // 32 * 4 * bits
    back_OI = filled(packed, mask, inputs, bits, n, m)
    assert back_OI is not None and torch.equal(back_OI, codes_OI)


def test_a_sparse_model_is_smaller_and_the_same(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "llama")
    told = {}
    for name, options in (
        ("dense", {"bits": 4, "group": 32, "symmetric": True}),
        ("sparse", {"n": 2, "m": 4, "bits": 4, "group": 32}),
    ):
        method = build(Method("nm" if name == "sparse" else "gptq", options), Compressor, "test")  # type: ignore[type-abstract]
        told[name] = compress(model, method, tmp_path / name, CompressionRequest(samples=4, length=64, check_tokens=0))
    # Two codes of four bits and a bit for each of four weights instead of four codes: three quarters, and the scales.
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    name = "layers.0.ffn.gate_up.weight"
    stored = tensors[f"{name}.codes"].numel() + tensors[f"{name}.mask"].numel()
    assert stored == 2 * 96 * 64 * 3 // 8
    assert told["sparse"]["bytes"] < told["dense"]["bytes"]
    weight_OI = load(tmp_path / "sparse").layers[0].ffn.gate_up.weight.dense()  # type: ignore[union-attr, operator]
    assert int((weight_OI.unflatten(1, (-1, 4)) != 0).sum(-1).max()) == 2
    tensors[f"{name}.mask"][0, 0] = 255
    save_file(tensors, tmp_path / "sparse" / "model.safetensors")
    with pytest.raises(UserError, match="does not keep 2 of every 4"):
        load(tmp_path / "sparse")
