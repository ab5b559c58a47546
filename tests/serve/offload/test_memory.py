"""What an offloaded model takes of a process's memory, from the first byte that is read to the last token: the buffers
or the cache, and what is not offloaded. Loading never holds more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.directory import save
from moesaic.model.transformer import Model
from tests.test_docs import ROOT
from tests.waiting import PATIENCE

LAYERS, HIDDEN, EXPERTS, WIDTH, VOCABULARY = 12, 256, 16, 256, 512
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 4
SLACK = 24 << 20  # threads, the KV cache, activations, what the allocator keeps

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured by Linux")


def made(directory: Path, layers: int) -> Path:
    config = ModelConfig(
        family="qwen3_moe",
        vocab=VOCABULARY,
        hidden=HIDDEN,
        attention=GroupedQuery(4, 2, 64, qk_norm=True),
        rope=Rope(64),
        layers=(Layer(Experts(EXPERTS, 2, WIDTH)),) * layers,
        context=256,
        dtype="float32",
    )
    save(Model(config).initialize(seed=1), directory)
    return directory


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peaks")
    small, directory = made(folder / "small", 1), made(folder / "model", LAYERS)

    def of(**options):
        command = [sys.executable, "-m", "tests.serve.offload.peak", str(small), str(directory), json.dumps(options)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return of


@pytest.fixture(scope="module")
def whole(measured):
    return measured()


def others() -> int:
    """Bytes of everything but experts."""
    attention = HIDDEN * 64 * (4 + 2 + 2) + 4 * 64 * HIDDEN + EXPERTS * HIDDEN
    return 4 * (LAYERS * attention + 2 * VOCABULARY * HIDDEN)


def test_all_in_memory_is_what_the_arithmetic_says(whole):
    weights = LAYERS * EXPERTS * EXPERT_BYTES + others()
    assert 0.85 * weights <= whole["bytes"] <= weights + SLACK  # what the small model had is used again


@pytest.mark.parametrize("share", [0.5, 0.125])
def test_experts_take_their_cache(measured, whole, share):
    cache = int(share * LAYERS * EXPERTS * EXPERT_BYTES)
    found = measured(offload="experts", expert_cache_bytes=cache)
    assert found["tokens"] == whole["tokens"]
    assert cache // 2 < found["bytes"] <= cache + others() + SLACK < whole["bytes"]


def test_layers_take_two_buffers(measured, whole):
    found = measured(offload="weights")
    buffers = 2 * (EXPERTS * EXPERT_BYTES + others() // LAYERS)
    assert found["tokens"] == whole["tokens"]
    assert found["bytes"] <= buffers + others() + SLACK < whole["bytes"] // 2
