"""What kinds of engine a worker can be: one process, or a group of ranks that runs one model.

A kind says how many processes there are, what the first does (it has the engine, and the front talks to it) and what
the others do until the first ends. `EngineOptions` say which kind it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from moesaic.kernels import hardware
from moesaic.serve.cluster.messages import EngineOptions
from moesaic.serve.core.encoder_engine import engine_for
from moesaic.serve.core.engine import Engine
from moesaic.serve.group.apart.ranks import apart_layout, follow_apart, join_apart, open_apart
from moesaic.serve.group.engine import GroupEngine
from moesaic.serve.group.rank_state import RankStats, peak_bytes
from moesaic.serve.group.ranks import follow, join, open_engine, serving_layout
from moesaic.serve.offload.loading import load_served
from moesaic.serve.pages.identity import with_identity

Joined = TypeVar("Joined")  # what a rank is among others


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
        return engine_for(load_served(options.directory, **_load_options(options, 0)), **running)

    def follow(self, options: EngineOptions, rank: int, address: str) -> None:
        raise AssertionError("there is one rank")

    def rank_stats(self, engine: Engine) -> list[RankStats]:
        weights = sum(tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers()))
        cached = sum(tensor.nbytes for layer in engine.cache.layers for tensor in layer.values())
        cached += engine.cache.states.bytes if engine.cache.states is not None else 0
        return [RankStats(0, weights, cached, peak_bytes(engine.model.device), sent=0, messages=0)]

    def close(self, engine: Engine) -> None:
        if engine.outside is not None:
            engine.outside.close()


@dataclass(frozen=True)
class RankGroup(Generic[Joined]):
    """Ranks that run one model: how one meets the others (its rank, where, patience, device), what rank 0 does then,
    and what the others do."""

    ranks: int
    vital: int
    join: Callable[[int, str, float, torch.device], Joined]
    lead: Callable[[Joined, Path, dict[str, Any], dict[str, Any]], GroupEngine]
    serve: Callable[[Joined, Path, dict[str, Any], dict[str, Any]], None]

    def open(self, options: EngineOptions, address: str) -> Engine:
        joined, loading = self._join(options, 0, address)
        return self.lead(joined, options.directory, loading, with_identity(options.directory, options.engine_options))

    def follow(self, options: EngineOptions, rank: int, address: str) -> None:
        joined, loading = self._join(options, rank, address)
        self.serve(joined, options.directory, loading, options.engine_options)

    def rank_stats(self, engine: Engine) -> list[RankStats]:
        return cast(GroupEngine, engine).rank_stats()

    def close(self, engine: Engine) -> None:
        cast(GroupEngine, engine).close()

    def _join(self, options: EngineOptions, rank: int, address: str) -> tuple[Joined, dict[str, Any]]:
        loading = _load_options(options, rank)
        device = torch.device(loading.get("device") or hardware.device())
        return self.join(rank, address, options.stall_seconds, device), loading


def engine_kind(options: EngineOptions) -> EngineKind:
    if "experts=" in options.layout:  # ranks of experts may die, and those that attend go on
        apart = apart_layout(options.layout)
        return RankGroup(apart.devices, apart.attention.devices, partial(join_apart, apart), open_apart, follow_apart)
    if options.layout:
        layout = serving_layout(options.layout)
        return RankGroup(layout.devices, layout.devices, partial(join, layout), open_engine, follow)
    return OneProcess()


def _load_options(options: EngineOptions, rank: int) -> dict[str, Any]:
    return options.load_options | ({"device": options.devices[rank]} if options.devices else {})
