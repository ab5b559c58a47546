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
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from moesaic.data.preparation.prepare import prepare
from moesaic.recipe import load_recipe
from tests import forked
from tests.figures import leave_blank
from tests.parallel import dying

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
    """`faults`: one for each attempt, as dying.py takes them. Ranks are forked, and started and restarted by torchrun's
    own agent."""
    words = ["--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    words += ["--max-restarts", str(len(faults) if restarts is None else restarts), "--start-method", "forkserver"]
    words += ["dying.py", ",".join(faults)]
    words += ["train", str(RECIPE), "--out", str(out), *SETTINGS, data, *overrides]
    return forked.run(words, function=torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"})


def torchrun(words: list[str]) -> int:
    config, _, arguments = config_from_args(parse_args(words))
    try:
        elastic_launch(config, rank_main)(os.getpid(), *arguments[-len(words) + words.index("dying.py") + 1 :])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def rank_main(launcher: int, faults: str, *words: str) -> None:
    for number in (1, 2):  # it says what it says where its launcher does, not the server that forked it
        os.dup2(os.open(f"/proc/{launcher}/fd/{number}", os.O_WRONLY), number)
    leave_blank()
    if code := dying.main(faults, list(words)):
        sys.exit(code)


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
