"""What kinds of engine a worker can be: one process, or a group of ranks that runs one model.

A kind says how many processes there are, what the first does (it has the engine, and the front talks to it) and what
the others do until the first ends. `EngineOptions` say which kind it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from moesaic.kernels import hardware
from moesaic.serve.cluster.messages import EngineOptions
from moesaic.serve.core.engine import Engine
from moesaic.serve.group.apart.ranks import ApartRanks, apart_layout, follow_apart, join_apart, open_apart
from moesaic.serve.group.engine import GroupEngine
from moesaic.serve.group.rank_state import RankStats, peak_bytes
from moesaic.serve.group.ranks import WorkerGroup, follow, join, open_engine, serving_layout
from moesaic.serve.offload.loading import load_served
from moesaic.serve.pages.identity import with_identity


class EngineKind(Protocol):
    @property
    def ranks(self) -> int: ...

    @property
    def vital(self) -> int:
        """How many of the ranks, the first ones, the engine cannot do without; others may die and come back."""

    def open(self, options: EngineOptions, address: str) -> Engine:
        """On rank 0. `address` is where ranks meet, host:port."""

    def follow(self, options: EngineOptions, rank: int, address: str) -> None:
        """On another rank, until rank 0 ends or dies."""

    def rank_stats(self, engine: Engine) -> list[RankStats]:
        """On rank 0, between two steps."""

    def close(self, engine: Engine) -> None:
        """On rank 0: end the others."""


@dataclass(frozen=True)
class OneProcess:
    ranks: int = 1
    vital: int = 1

    def open(self, options: EngineOptions, address: str) -> Engine:
        running = with_identity(options.directory, options.engine_options)
        return Engine(load_served(options.directory, **_load_options(options, 0)), **running)

    def follow(self, options: EngineOptions, rank: int, address: str) -> None:
        raise AssertionError("there is one rank")

    def rank_stats(self, engine: Engine) -> list[RankStats]:
        weights = sum(tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers()))
        cached = sum(tensor.nbytes for layer in engine.cache.layers for tensor in layer.values())
        return [RankStats(0, weights, cached, peak_bytes(engine.model.device), sent=0, messages=0)]

    def close(self, engine: Engine) -> None:
        if engine.outside is not None:
            engine.outside.close()


class Group:
    """A layout's ranks."""

    def __init__(self, layout: str) -> None:
        self.layout = serving_layout(layout)
        self.ranks = self.vital = self.layout.devices

    def open(self, options: EngineOptions, address: str) -> Engine:
        group, loading = self._join(options, 0, address)
        return open_engine(group, options.directory, loading, with_identity(options.directory, options.engine_options))

    def follow(self, options: EngineOptions, rank: int, address: str) -> None:
        group, loading = self._join(options, rank, address)
        follow(group, options.directory, loading, options.engine_options)

    def rank_stats(self, engine: Engine) -> list[RankStats]:
        return cast(GroupEngine, engine).rank_stats()

    def close(self, engine: Engine) -> None:
        cast(GroupEngine, engine).close()

    def _join(self, options: EngineOptions, rank: int, address: str) -> tuple[WorkerGroup, dict[str, Any]]:
        loading = _load_options(options, rank)
        device = torch.device(loading.get("device") or hardware.device())
        return join(self.layout, rank, address, options.stall_seconds, device), loading


class Apart:
    """Ranks that attend and, behind them, ranks of experts, without any of which the others go on."""

    def __init__(self, layout: str) -> None:
        self.layout = apart_layout(layout)
        self.ranks, self.vital = self.layout.devices, self.layout.attention.devices

    def open(self, options: EngineOptions, address: str) -> Engine:
        ranks, loading = self._join(options, 0, address)
        return open_apart(ranks, options.directory, loading, with_identity(options.directory, options.engine_options))

    def follow(self, options: EngineOptions, rank: int, address: str) -> None:
        ranks, loading = self._join(options, rank, address)
        follow_apart(ranks, options.directory, loading, options.engine_options)

    def rank_stats(self, engine: Engine) -> list[RankStats]:
        return cast(GroupEngine, engine).rank_stats()

    def close(self, engine: Engine) -> None:
        cast(GroupEngine, engine).close()

    def _join(self, options: EngineOptions, rank: int, address: str) -> tuple[ApartRanks, dict[str, Any]]:
        loading = _load_options(options, rank)
        device = torch.device(loading.get("device") or hardware.device())
        return join_apart(self.layout, rank, address, options.stall_seconds, device), loading


def engine_kind(options: EngineOptions) -> EngineKind:
    if "experts=" in options.layout:
        return Apart(options.layout)
    return Group(options.layout) if options.layout else OneProcess()


def _load_options(options: EngineOptions, rank: int) -> dict[str, Any]:
    return options.load_options | ({"device": options.devices[rank]} if options.devices else {})
