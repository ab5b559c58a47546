"""Quantized weights, offloaded: experts by their number, or whole layers, with the bits of all in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesaic
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.methods import Method, build
from moesaic.serve.offload.loading import load_served
from tests.compress.made import make
from tests.serve.offload.models import answers

WISH = CompressionRequest(samples=4, length=64, check_tokens=0, min_expert_tokens=16)
SIZES = {"num_experts": 8, "num_hidden_layers": 3}
CASES = {
    "4 bits": ("rtn", {"bits": 4, "group": 32, "symmetric": False}),
    "8 bits": ("rtn", {"bits": 8, "group": 64}),
    "mixed bits": ("mixed", {"bits": 4.0, "group": 32}),
    "with corrections": ("milo", {"bits": 3, "group": 32, "rank": 4, "expert_rank": 4, "turns": 1}),
}


@pytest.fixture(scope="module", params=CASES)
def directory(request, tmp_path_factory) -> Path:
    method, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("quantized")
    made = build(Method(method, options), Compressor, "test")
    compress(make(folder / "model", "qwen3_moe", **SIZES), made, folder / "out", WISH)
    return folder / "out"


@pytest.fixture(scope="module")
def whole(directory):
    return {dtype: answers(moesaic.load(directory, threads=1, dtype=dtype)) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("share", [1.0, 0.5, 0.15])
@pytest.mark.parametrize(("home", "dtype"), [("disk", "float32"), ("host", "float32"), ("disk", "bfloat16")])
def test_experts(directory, whole, share, home, dtype):
    options = {"offload": "experts", "offload_from": home, "threads": 1, "dtype": dtype}
    all_cached = load_served(directory, expert_cache_bytes=1 << 30, **options)
    pools = {id(layer.slots): layer.slots for layer in all_cached.ops.layers.values()}.values()
    total = sum(pool.cache.slots * pool.bytes for pool in pools)
    model = load_served(directory, expert_cache_bytes=int(share * total), **options)
    assert answers(model) == whole[dtype]
    assert (model.ops.counts.misses > 0) == (share < 1)


@pytest.mark.parametrize("home", ["disk", "host"])
def test_layers(directory, whole, home):
    model = load_served(directory, offload="weights", offload_from=home, threads=1)
    assert answers(model) == whole["float32"]
