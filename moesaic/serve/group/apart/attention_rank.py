"""The ranks that attend: a worker group without experts, whose steps run as two micro-batches in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.model.context import ForwardContext
from moesaic.model.layout import Layout, PagedCache
from moesaic.model.transformer import Model
from moesaic.parallel.experts.placement import SlotPlan
from moesaic.serve.core.adapters import Adapter
from moesaic.serve.group.apart import ping_pong
from moesaic.serve.group.apart.away import AwayKernels, ExpertsAway, MicroBatch
from moesaic.serve.group.apart.expert_rank import end
from moesaic.serve.group.apart.wires import Wire
from moesaic.serve.group.engine import GroupEngine
from moesaic.serve.group.experts.rebalancing import Changes, Rebalancer
from moesaic.serve.group.follower import Follower
from moesaic.serve.group.links import RankLost
from moesaic.serve.group.rank_state import RankState, RankStats
from moesaic.serve.group.rank_step import RankStep
from moesaic.serve.group.shares import spans
from moesaic.serve.group.step_array import Command, Piece, Reader
from moesaic.serve.group.worker_group import WorkerGroup

logger = logging.getLogger("moesaic.serve")


class ApartStep(RankStep):
    def __init__(self, model: Model, group: WorkerGroup, cache: PagedCache, away: ExpertsAway) -> None:
        super().__init__(model, group, cache)
        self.away = away
        self.cuts_sequences = ping_pong.cuts_sequences(model)

    def _run_layers(
        self, x_TD: Tensor, context: ForwardContext, pieces: Sequence[Piece], adapters: dict[int, Adapter]
    ) -> Tensor:
        group = self.group
        parts = [self._cuts([piece for piece in pieces if piece.dp == dp]) for dp in range(group.layout.dp)]
        own = [piece for piece in pieces if piece.dp == group.dp]
        turn = self.kernels.steps

        def ops_of(number: int, layout: Layout) -> Kernels:
            sequences = [own[sequence] for sequence, _, _ in parts[group.dp][number].runs]
            plain = self._ops(sequences, layout, adapters)
            micro = MicroBatch(number, self._askers(parts, number), turn)
            return cast(Kernels, AwayKernels(plain, self.away, micro, self._share, self._gather))

        return ping_pong.run(self.model, x_TD, context, ops_of, parts[group.dp], self.away.watch)

    def _cuts(self, pieces: Sequence[Piece]) -> list[ping_pong.Cut]:
        whole = [not self.cuts_sequences or bool(piece.parents) for piece in pieces]
        return ping_pong.cuts([len(piece.tokens) for piece in pieces], whole)

    def _askers(self, parts: Sequence[Sequence[ping_pong.Cut]], number: int) -> int:
        """A bit for each rank that has rows of this micro-batch: a data-parallel rank's are divided among its ranks."""
        tp, found = self.group.layout.tp, 0
        for dp, cuts in enumerate(parts):
            if number < len(cuts):
                for rank, (start, stop) in enumerate(spans(cuts[number].rows, tp)):
                    found |= (start < stop) << (dp * tp + rank)
        return found

    def _share(self, rows: int) -> slice:
        return slice(*spans(rows, self.group.tensor.size)[self.group.tensor.index])

    def _gather(self, own_ND: Tensor, rows: int) -> Tensor:
        shares = spans(rows, self.group.tensor.size)
        return self.group.tensor.rows(own_ND, [stop - start for start, stop in shares], "rows")


# The wire to an expert rank in its so-many-th life.
Connect = Callable[[int, int], Wire]


class ApartState(RankState):
    def __init__(
        self, model: Model, group: WorkerGroup, cache: PagedCache, away: ExpertsAway, connect: Connect
    ) -> None:
        super().__init__(model, group, cache)
        self.away, self.connect = away, connect
        self.step = ApartStep(model, group, cache, away)

    def move_experts(self, changes: Changes) -> None:
        self.away.change(changes)
        if self.group.is_main:
            self.away.keep(changes)

    def rejoin(self, expert: int, life: int) -> None:
        """All ranks that attend together, between two steps."""
        try:
            self.away.rejoin(expert, self.connect(expert, life))
        except RankLost as error:  # it died again meanwhile
            logger.error("expert rank %d came back and was lost: %s", expert, error)
        if self.group.is_main:
            self.away.keep(self.away.plans)


class ApartEngine(GroupEngine):
    """Rank 0 of the ranks that attend."""

    predicts = False

    def __init__(
        self,
        model: Model,
        group: WorkerGroup,
        away: ExpertsAway,
        connect: Connect,
        life_of: Callable[[int], int],
        rebalance_steps: int = 0,
        **options: Any,
    ) -> None:
        """`life_of` says in which life an expert rank is that waits to be connected."""
        self.away, self.connect, self.life_of = away, connect, life_of
        self.lives: dict[int, int] = {}
        super().__init__(model, group, None, rebalance_steps, **options)

    def new_cache(self, pages: int, page_size: int, dtype: torch.dtype, sequences: int) -> PagedCache:
        cache = super().new_cache(pages, page_size, dtype, sequences)
        self.state: ApartState = ApartState(self.model, self.group, cache, self.away, self.connect)
        return cache

    def before_step(self) -> None:
        for expert in list(self.away.lost):
            if (life := self.life_of(expert)) > self.lives.get(expert, 1):
                self.lives[expert] = life
                self.tell(Command.REJOIN, [expert, life])
                self.state.rejoin(expert, life)
        super().before_step()

    def rank_stats(self) -> list[RankStats]:
        """Also of the expert ranks, behind the others."""
        found, first = super().rank_stats(), self.group.ranks
        for expert, one in self.away.stats().items():
            found.append(RankStats(first + expert, one.bytes, 0, one.peak, one.sent, one.messages))
        return found

    def new_rebalancer(self, steps: int) -> Rebalancer | None:
        # Not while a rank is lost: whoever took its experts has more slots than the others.
        def plans() -> dict[int, SlotPlan]:
            return {} if self.away.lost else self.away.plans

        return Rebalancer(self.experts, plans, self.move_experts, steps) if steps else None

    def load_weights(self, directory: str | Path, recompute: bool = True) -> None:
        problem = "expert ranks read their weights once"
        raise UserError("--experts", problem, "Start a worker with the new weights beside this one.")

    def close(self) -> None:
        super().close()
        end(self.away.wires)


class ApartFollower(Follower):
    def __init__(self, model: Model, group: WorkerGroup, away: ExpertsAway, connect: Connect) -> None:
        super().__init__(model, group)
        self.away, self.connect = away, connect

    def run(self) -> None:
        super().run()
        end(self.away.wires)

    def _start(self, body: Reader) -> RankState:
        cache = super()._start(body).cache
        return ApartState(self.model, self.group, cache, self.away, self.connect)

    def _do(self, command: Command, body: Reader) -> None:
        if command == Command.REJOIN:
            cast(ApartState, self.state).rejoin(*body.take(2))
        else:
            super()._do(command, body)
