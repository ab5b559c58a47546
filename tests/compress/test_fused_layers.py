"""Layers of few bits in one native call: the bits of the same operations one by one, with any number of threads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.kernels import native
from moesaic.kernels.native.fused_layers import MAX_STACK_TOKENS
from moesaic.kernels.native.quantized_fused_layers import QuantizedFusedLayers
from moesaic.methods import Method, build
from moesaic.model.context import ForwardContext
from moesaic.model.directory import load
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from tests.compress.made import make

WISH = CompressionRequest(samples=4, length=64, check_tokens=0, min_expert_tokens=16)
SHARED: dict[str, Any] = {
    "moe_intermediate_size": 36, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "mixture": ("qwen3_moe", {}, "rtn", {"bits": 4, "group": 32, "symmetric": False}),
    "dense": ("llama", {"intermediate_size": 100}, "rtn", {"bits": 3, "group": 64}),
    "eight bits of activations": ("llama", {}, "zeroquant", {"bits": 8, "group": 0, "steps": 0}),
    "shared": ("glm4_moe", SHARED, "rtn", {"bits": 2, "group": 32}),
    "mixed": ("qwen3_moe", {}, "mixed", {"bits": 4.0, "group": 32, "rounding": "rtn"}),
}


def steps(model: Model, pages: int = 5) -> list[torch.Tensor]:
    """A prompt of two sequences, then three tokens of each, then one alone."""
    cache = model.new_cache(pages, 16)
    table, found = [[0, 1, 3], [2, 4]], []
    done = [0, 0]
    with torch.inference_mode():
        for lengths in ([25, 15], [1, 1], [1, 1], [5, 2], [1, 0]):
            chosen = [number for number, length in enumerate(lengths) if length]
            layout = Layout(
                [lengths[n] for n in chosen],
                cached=[done[n] for n in chosen],
                cache=cache,
                pages=[table[n] for n in chosen],
            )
            tokens_T = torch.arange(sum(lengths)) + 5 + sum(done)
            found.append(model(tokens_T, layout))
            done = [before + length for before, length in zip(done, lengths, strict=True)]
    return found


@pytest.mark.skipif(native.kernels() is None, reason="there is no C compiler")
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, sizes, method, options = CASES[case]
    made = build(Method(method, options), Compressor, "test")  # type: ignore[type-abstract]
    compress(make(tmp_path / "model", kind, **sizes), made, tmp_path / "out", WISH)
    model = load(tmp_path / "out")
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[f"all layers, {threads}"] = steps(model)
    fused = [model._stack, *(block.stack for block in model.layers)]
    assert all(isinstance(stack.prepared["native"], QuantizedFusedLayers) for stack in fused)
    assert model._stack.prepared["native"].takes()
    other = copy.deepcopy(model)  # whose weights lie elsewhere
    with torch.no_grad():
        other.layers[0].attention.qkv.weight.scales_XGO.mul_(1.5)  # type: ignore[union-attr, operator]
    assert not torch.equal(steps(other)[1], found["all layers, 1"][1])
    monkeypatch.setattr(Model, "_layer_stack", lambda model: None)
    found["a layer at a time"] = steps(model)
    monkeypatch.setattr(ForwardContext, "run_fused", lambda *arguments: None)
    found["one by one"] = steps(model)
    for name, outputs in found.items():
        assert all(map(torch.equal, outputs, found["one by one"])), name
    assert MAX_STACK_TOKENS < 40  # or the prompt never goes a layer at a time
