"""Ranks that attend and ranks that hold experts, as one engine.

    layout = apart_layout("tp=2 experts=2")
    ranks = join_apart(layout, rank, "127.0.0.1:29400")
    engine = open_apart(ranks, directory, load_options, engine_options)      on rank 0
    follow_apart(ranks, directory, load_options, engine_options)             on the others

The first ranks attend, in a worker group of their own (tp, dp); the last ones hold experts. An expert rank that dies is
left out and the engine goes on; the death of a rank that attends ends the group, as in any worker group.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.directory import chosen_threads
from moesaic.model.transformer import Model
from moesaic.parallel.experts.placement import SlotPlan
from moesaic.parallel.layout import ParallelLayout
from moesaic.serve.group.apart.attention_rank import ApartEngine, ApartFollower
from moesaic.serve.group.apart.away import ExpertsAway, plans_for
from moesaic.serve.group.apart.expert_rank import ExpertRank
from moesaic.serve.group.apart.wires import Wire
from moesaic.serve.group.engine import agreed_cache_bytes
from moesaic.serve.group.experts.rebalancing import ExpertOptions
from moesaic.serve.group.experts.slots import ExpertReader, LayerExperts
from moesaic.serve.group.links import Traffic
from moesaic.serve.group.loading import load_share
from moesaic.serve.group.refusals import check_options
from moesaic.serve.group.worker_group import STALL_SECONDS, WorkerGroup, meeting_store, serving_layout


@dataclass(frozen=True)
class ApartLayout:
    attention: ParallelLayout
    experts: int

    @property
    def devices(self) -> int:
        return self.attention.devices + self.experts


def apart_layout(text: str, place: str = "--attention") -> ApartLayout:
    """`tp=2 experts=2`; what is said beside `experts` is about the ranks that attend."""
    counts = re.findall(r"\bexperts\s*=\s*(\d+)", text)
    if len(counts) != 1 or int(counts[0]) < 1:
        raise UserError(place, f"{text!r} does not say how many ranks hold experts", "Say --experts 2.")
    attention = serving_layout(re.sub(r"\bexperts\s*=\s*\d+", "", text).strip() or "tp=1", place)
    if attention.ep > 1:
        raise UserError(f"{place}: ep={attention.ep}", "experts have ranks of their own here", "Say --experts.")
    return ApartLayout(attention, int(counts[0]))


def chosen_layout(layout: str | None, attention: str | None, experts: int | None) -> str:
    """What --layout, --attention and --experts say together, as one layout; checked."""
    if attention is None and experts is None:
        return layout or ""
    if attention is None or experts is None:
        given, missing = ("--experts", "--attention") if attention is None else ("--attention", "--experts")
        raise UserError(given, f"needs {missing}", f"Say how many ranks with {missing}, too.")
    if layout:
        raise UserError("--layout", "has no place beside --attention", 'Say --attention "tp=2", or as you need.')
    text = f"{f'tp={attention}' if attention.isdigit() else attention} experts={experts}"
    apart_layout(text)
    return text


@dataclass
class ApartRanks:
    """`group` is None on a rank of experts. `life` is above 1 on one that takes the place of another that died."""

    layout: ApartLayout
    rank: int
    device: torch.device
    store: dist.Store
    stall_seconds: float
    life: int
    neighbours: int  # ranks on this machine
    group: WorkerGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    wires: dict[int, Wire] = field(default_factory=dict)  # to the ranks of the other kind, by their numbers there

    @property
    def expert(self) -> int:
        """This rank's number among those of experts; below 0 for one that attends."""
        return self.rank - self.layout.attention.devices

    def connect(self) -> None:
        """Meet the ranks of the other kind."""
        if self.expert < 0:
            self.wires = {expert: self.wire_to(expert) for expert in range(self.layout.experts)}
            return
        if self.life > 1:  # rank 0 looks for this before a step
            self.store.set(f"apart/again/{self.expert}", str(self.life))
        for asker in range(self.layout.attention.devices):
            self.wires[asker] = Wire(self.store, asker, self.expert, 1, self.stall_seconds, self.traffic, self.life)

    def wire_to(self, expert: int, life: int = 1) -> Wire:
        return Wire(self.store, self.rank, expert, 0, self.stall_seconds, self.traffic, life)

    def life_of(self, expert: int) -> int:
        """Of an expert rank that waits to be let in; 0 if none does."""
        key = f"apart/again/{expert}"
        return int(self.store.get(key)) if self.store.check([key]) else 0


def join_apart(
    layout: ApartLayout,
    rank: int,
    address: str,
    stall_seconds: float = STALL_SECONDS,
    device: torch.device | str = "cpu",
) -> ApartRanks:
    """Meet the other ranks, as in `join`."""
    store = meeting_store(address, rank, layout.devices, stall_seconds)
    life = store.add(f"apart/life/{rank}", 1)
    store.set(f"apart/host/{rank}", socket.gethostname())
    hosts = [store.get(f"apart/host/{other}") for other in range(layout.devices)]
    found = ApartRanks(layout, rank, torch.device(device), store, stall_seconds, life, hosts.count(hosts[rank]))
    if found.expert < 0:
        found.group = WorkerGroup(layout.attention, rank, store, stall_seconds, found.device)
        found.group.experts_away, found.traffic = True, found.group.traffic
    if life == 1:  # before loading, which takes a while
        found.connect()
    return found


def open_apart(
    ranks: ApartRanks, directory: str | Path, load_options: dict[str, Any], engine_options: dict[str, Any]
) -> ApartEngine:
    """Rank 0's engine. The others must `follow_apart` with the same arguments."""
    of_experts, options = ExpertOptions.taken_from(engine_options)
    model, group, away = _attention(ranks, directory, load_options, options, of_experts.copies)
    options["cache_bytes"] = agreed_cache_bytes(group, model, options.get("cache_bytes"))
    return ApartEngine(model, group, away, ranks.wire_to, ranks.life_of, of_experts.steps, **options)


def follow_apart(
    ranks: ApartRanks, directory: str | Path, load_options: dict[str, Any], engine_options: dict[str, Any]
) -> None:
    """Until rank 0 ends the group (returns) or is lost (`RankLost`)."""
    of_experts, options = ExpertOptions.taken_from(engine_options)
    if ranks.expert >= 0:
        expert_rank(ranks, directory, load_options, of_experts.copies).serve()
        return
    model, group, away = _attention(ranks, directory, load_options, options, of_experts.copies)
    agreed_cache_bytes(group, model, options.get("cache_bytes"))
    ApartFollower(model, group, away, ranks.wire_to).run()


def expert_rank(ranks: ApartRanks, directory: str | Path, load_options: dict[str, Any], copies: int = 0) -> ExpertRank:
    """What a rank of experts answers with. It reads its experts and nothing else of the model."""
    threads = load_options.get("threads") or max(1, hardware.threads() // ranks.neighbours)
    torch.set_num_threads(chosen_threads(threads))
    device = torch.device(load_options.get("device") or ranks.device)
    reader = ExpertReader(directory, load_options.get("dtype"), device)
    plans = first_plans(reader.config, ranks.layout.experts, copies)
    held = {layer: LayerExperts(reader, layer, plan.slots[ranks.expert]) for layer, plan in plans.items()}
    if ranks.life > 1:
        ranks.connect()
    return ExpertRank(reader, held, ranks.wires, reader.kernels(load_options.get("mode", "fast")))


def first_plans(config: ModelConfig, ranks: int, copies: int = 0) -> dict[int, SlotPlan]:
    """Before anything was measured, with `copies` further slots on each rank."""
    counts = expert_counts(config)
    for count in counts.values():
        if ranks > count:
            raise UserError(f"--experts {ranks}", f"are more ranks than a layer's {count} experts", "Take fewer.")
    if not counts:
        raise UserError("--experts", "the model has no experts", "Serve it with --layout.")
    slots = {layer: min(count, -(-count // ranks) + copies) for layer, count in counts.items()}
    return plans_for(counts, ranks, slots)


def expert_counts(config: ModelConfig) -> dict[int, int]:
    return {n: layer.ffn.count for n, layer in enumerate(config.layers) if isinstance(layer.ffn, Experts)}


def _attention(
    ranks: ApartRanks, directory: str | Path, load_options: dict[str, Any], options: dict[str, Any], copies: int
) -> tuple[Model, WorkerGroup, ExpertsAway]:
    group = ranks.group
    assert group is not None
    check_options(options)
    tiers = options.get("tiers")
    if tiers is not None and (tiers.travel or tiers.host_bytes or tiers.disk_bytes):
        problem = "where attention and experts are apart, pages stay in the KV cache"
        raise UserError("--prefill, --cache-host-gb, --cache-disk-gb", problem, "Leave it out.")
    group.neighbours = ranks.neighbours
    model = load_share(group, directory, load_options)
    plans = first_plans(model.config, ranks.layout.experts, copies)
    return model, group, ExpertsAway(ranks.wires, plans, expert_counts(model.config))
