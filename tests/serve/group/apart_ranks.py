"""Engines with attention and experts apart, in real processes (gloo), for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic.serve.group.apart.ranks import apart_layout, expert_rank, follow_apart, join_apart, open_apart
from tests.parallel.ranks import start
from tests.serve.group.groups import NUMBERS, Case

# What an expert rank of a case does before it serves: (rank, number among expert ranks, what it serves with).
Prepare = Callable[[int, Any], None]


def in_apart(cases: Sequence[Case], folder: Path, prepare: Prepare | None = None) -> list[Any]:
    """What `work(engine, *args)` gives on rank 0 of each case, one after the other in the same processes."""
    ranks = max(apart_layout(case.layout).devices for case in cases)
    addresses = [meeting_place(folder) for _ in cases]
    start(run_rank, (cases, addresses, str(folder), prepare), ranks)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(cases))]


def meeting_place(folder: Path) -> str:
    return f"file:{folder / f'{next(NUMBERS)}.store'}"


def run_rank(
    rank: int, cases: Sequence[Case], addresses: Sequence[str], folder: str, prepare: Prepare | None = None
) -> None:
    torch.set_num_threads(1)
    for number, (case, address) in enumerate(zip(cases, addresses, strict=True)):
        layout = apart_layout(case.layout)
        if rank >= layout.devices:
            continue
        ranks = join_apart(layout, rank, address, stall_seconds=60.0)
        if rank == 0:
            engine = open_apart(ranks, case.directory, case.load, case.options)
            found = case.work(engine, *case.args)
            engine.close()
            (Path(folder) / f"{number}.json").write_text(json.dumps(found))
        elif ranks.expert >= 0 and prepare is not None:
            serving = expert_rank(ranks, case.directory, case.load, case.options.get("expert_replicas", 0))
            prepare(ranks.expert, serving)
            serving.serve()
        else:
            follow_apart(ranks, case.directory, case.load, case.options)
