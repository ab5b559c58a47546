"""The ranks of a worker group: one engine over many processes, the same bits as one.

    layout = serving_layout("tp=2 ep=2")
    group = join(layout, rank, "127.0.0.1:29400")
    engine = open_engine(group, directory, load_options, engine_options)     on rank 0: an `Engine` like any other
    follow(group, directory, load_options, engine_options)                   on the others, until rank 0 ends or dies

Ranks are ordered dp, tp, the last running fastest; experts lie on `ep` ranks side by side. The process of a rank
belongs to its group: a group that lost a rank (`RankLost`) cannot go on, and whoever started its processes ends all of
them and starts it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.serve.group.engine import GroupEngine, agreed_cache_bytes
from moesaic.serve.group.experts.group_slots import GroupSlots
from moesaic.serve.group.experts.rebalancing import ExpertOptions
from moesaic.serve.group.follower import Follower
from moesaic.serve.group.links import RankLost as RankLost
from moesaic.serve.group.loading import load_share
from moesaic.serve.group.pages import check_tiers
from moesaic.serve.group.refusals import check_options
from moesaic.serve.group.worker_group import WorkerGroup as WorkerGroup
from moesaic.serve.group.worker_group import join as join
from moesaic.serve.group.worker_group import serving_layout as serving_layout


def open_engine(
    group: WorkerGroup, directory: str | Path, load_options: dict[str, Any], engine_options: dict[str, Any]
) -> GroupEngine:
    """Rank 0's engine, over all ranks. The others must `follow` with the same arguments. `cache_bytes` is what every
    rank may take. `close` ends the group."""
    assert group.is_main
    of_experts, options = ExpertOptions.taken_from(engine_options)
    check_options(options, group.layout.dp == 1)
    check_tiers(options.get("tiers"), group)
    model = load_share(group, directory, load_options)
    slots = GroupSlots(model, group, directory, of_experts.copies) if of_experts else None
    options["cache_bytes"] = agreed_cache_bytes(group, model, options.get("cache_bytes"))
    return GroupEngine(model, group, slots, of_experts.steps, **options)


def follow(
    group: WorkerGroup, directory: str | Path, load_options: dict[str, Any], engine_options: dict[str, Any]
) -> None:
    """Run what rank 0 says until it ends the group (returns) or is lost (`RankLost`)."""
    assert not group.is_main
    of_experts, options = ExpertOptions.taken_from(engine_options)
    check_options(options, group.layout.dp == 1)
    check_tiers(options.get("tiers"), group)
    model = load_share(group, directory, load_options)
    slots = GroupSlots(model, group, directory, of_experts.copies) if of_experts else None
    agreed_cache_bytes(group, model, options.get("cache_bytes"))
    Follower(model, group, slots, options.get("tiers")).run()
