"""Engines with attention and experts apart, in real processes (gloo), for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moesaic.serve.group.apart.ranks import apart_layout, expert_rank, follow_apart, join_apart, open_apart
from tests.serve.group.groups import Case, cases_of, in_processes

# What an expert rank of a case does before it serves: (rank, number among expert ranks, what it serves with).
Prepare = Callable[[int, Any], None]


def in_apart(cases: Sequence[Case], folder: Path, prepare: Prepare | None = None) -> list[Any]:
    """What `work(engine, *args)` gives on rank 0 of each case, one after the other in the same processes."""
    return in_processes(run_rank, cases, folder, apart_layout, prepare)


def run_rank(
    rank: int, cases: Sequence[Case], addresses: Sequence[str], folder: str, prepare: Prepare | None = None
) -> None:
    for number, case, address, layout in cases_of(rank, cases, addresses, apart_layout):
        ranks = join_apart(layout, rank, address, stall_seconds=60.0)
        if rank == 0:
            case.keep(open_apart(ranks, case.directory, case.load, case.options), Path(folder) / f"{number}.json")
        elif ranks.expert >= 0 and prepare is not None:
            serving = expert_rank(ranks, case.directory, case.load, case.options.get("expert_replicas", 0))
            prepare(ranks.expert, serving)
            serving.serve()
        else:
            follow_apart(ranks, case.directory, case.load, case.options)
