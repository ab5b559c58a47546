"""`torchrun` for tests: a tiny run on real processes, and what it left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from moesaic.data.preparation.prepare import prepare
from moesaic.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny.yaml"
SETTINGS = (
    "train.dtype=float32", "train.steps=6", "train.save_every=2", "train.evaluate_every=0", "train.batch_tokens=1024",
    "data.sequence_length=128", "model.layers=2", "optimizer={name: adamw, lr: 0.003}", "parallel.exact=true",
)  # fmt: skip


def prepared(folder: Path) -> str:
    data = folder / "data"
    prepare(load_recipe(RECIPE, SETTINGS), data)
    return f"train.data={data}"


def train(
    out: Path, data: str, *overrides: str, ranks: int = 2, faults: Sequence[str] = (), restarts: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`faults`: one for each attempt, as dying.py takes them."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    words += ["--master-port", str(free_port())]
    words += ["--max-restarts", str(len(faults) if restarts is None else restarts)]
    words += [str(ROOT / "tests" / "parallel" / "dying.py"), ",".join(faults)]
    words += ["train", str(RECIPE), "--out", str(out), *SETTINGS, data, *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
