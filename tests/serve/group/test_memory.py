"""What each rank holds falls as the arithmetic says, and a model too large for one process is served by two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.model.formats.tensor_file import TensorFile
from moesaic.serve.group.engine import GroupEngine
from moesaic.serve.group.ranks import serving_layout
from tests.serve.group.groups import Case, alone, answers, in_groups, model_directory, some_requests

LAYOUTS = ["tp=1", "tp=2", "tp=4", "ep=2", "tp=2 ep=2", "tp=2 ep=4", "tp=4 ep=4"]
PAGES, PAGE = 40, 4


def held(engine: GroupEngine) -> Any:
    answers(engine, some_requests(2, tokens=2))
    return [[each.weights, each.cache] for each in engine.rank_stats()]


def expected(directory: Path, layout: str) -> tuple[int, int]:
    """By hand, from the directory's tensors: what is divided by tp, what by ep, and what every rank has."""
    sizes = serving_layout(layout)
    config = moesaic.load(directory).config
    total = 0
    stored = TensorFile(directory / "model.safetensors").tensors
    for name, tensor in stored.items():
        count = torch.Size(tensor.shape).numel()
        if ".experts." in name:
            total += count // (sizes.ep if sizes.ep > 1 else sizes.tp)
        elif any(part in name for part in ("k_proj", "v_proj")):
            total += count // min(sizes.tp, config.attention.kv_heads)  # heads are copied where ranks are more
        elif "norm" in name or "mlp.gate." in name:
            total += count
        else:
            total += count // sizes.tp
    heads = max(1, config.attention.kv_heads // sizes.tp)
    cache = len(config.layers) * 2 * heads * config.attention.head_size * PAGE * PAGES
    return 4 * total, 4 * cache


def test_weights_and_cache_of_every_rank(tmp_path: Path) -> None:
    sizes = {"vocab": 128, "hidden": 64, "moe_intermediate_size": 32, "head_dim": 16}
    directory = model_directory("qwen3_moe", tmp_path / "model", **sizes)
    cases = []
    for layout in LAYOUTS:
        _, cache = expected(directory, layout)
        cases.append(Case(layout, directory, held, page_size=PAGE, cache_bytes=cache, max_requests=8))
    whole = sum(parameter.nbytes for parameter in moesaic.load(directory).parameters())
    for case, found in zip(cases, in_groups(cases, tmp_path), strict=True):
        assert found == [list(expected(directory, case.layout))] * len(found), case.layout
        ranks = serving_layout(case.layout).devices
        assert len(found) == ranks and found[0][0] < whole * 1.2 / (1 if case.layout == "tp=1" else 1.5)


# A model larger than a process may be


def served_by(ranks: int, directory: Path, room: int, folder: Path) -> list[tuple[int, str]]:
    """Exit codes and what was said, of ranks that may each take `room` bytes for the model and all they do with it."""
    # An allocator that reserves memory long before it is needed would hide what is used.
    as_needed = dict.fromkeys(("EAGER_COMMIT", "ARENA_EAGER_COMMIT", "ARENA_RESERVE"), "0")
    where = {**os.environ, "OMP_NUM_THREADS": "1"} | {f"MIMALLOC_{key}": no for key, no in as_needed.items()}
    command = [sys.executable, "-m", "tests.serve.group.limited_rank"]
    running = [
        subprocess.Popen(
            [*command, *map(str, (rank, ranks, directory, folder, room))], env=where, stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    said = [each.communicate()[1].decode() for each in running]
    return [(each.returncode, words) for each, words in zip(running, said, strict=True)]


def test_a_model_too_large_for_one_process_is_served_by_two(tmp_path: Path) -> None:
    sizes = {"hidden": 512, "moe_intermediate_size": 256, "num_experts": 32}
    directory = model_directory("qwen3_moe", tmp_path / "model", **sizes, initializer_range=0.05)
    weights = (directory / "model.safetensors").stat().st_size
    room = int(0.7 * weights)
    assert weights > 140 * 2**20
    ((code, said),) = served_by(1, directory, room, tmp_path)
    assert code and "memory" in said.lower() and not (tmp_path / "found.json").exists()
    assert [code for code, _ in served_by(2, directory, room, tmp_path)] == [0, 0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == alone(directory, some_requests(3, tokens=3), page_size=4, cache_bytes=2**20)
