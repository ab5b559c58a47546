"""Experts seen from an attention rank: kernels in which rows travel to expert ranks, and what came back is added up.

    away = ExpertsAway(wires, plans, per_layer)
    ops = AwayKernels(model.ops, away).for_micro_batch(number, askers, turn)

An expert rank that is gone is left out from then on: its experts are asked of those that have copies, or of any other
rank, which reads them from the model directory; rows that it had not answered are asked again. Who notices does so by
itself, in the middle of a layer: nothing else has to stop or be told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.parallel.experts.placement import SlotPlan, after, without_rank
from moesaic.serve.group.apart.expert_rank import ExpertRankStats, Watch, tell
from moesaic.serve.group.apart.wires import KEEP, ROWS, STATS, Head, Wire, head_tensor, question
from moesaic.serve.group.experts.choice import Holders, add_in_order
from moesaic.serve.group.experts.rebalancing import Changes
from moesaic.serve.group.links import RankLost

logger = logging.getLogger("moesaic.serve")

READ_SECONDS = 600.0  # for an expert rank to read other experts, while nobody computes


class MicroBatch(NamedTuple):
    """`askers` has a bit for each attention rank with rows of it; `turn` is which copy of an expert is next."""

    number: int = 0
    askers: int = 0
    turn: int = 0


WHOLE = MicroBatch()  # a batch in one piece


class _Sent(NamedTuple):
    """Assignments that were asked of one rank, and the room for its answer."""

    rank: int
    index_A: Tensor
    answer_AD: Tensor
    work: Any
    leaving: list[tuple[Any, Tensor]]


class ExpertsAway:
    """`wires` lead to expert ranks, by their numbers from 0; `plans` say who holds what in each layer."""

    def __init__(self, wires: dict[int, Wire], plans: dict[int, SlotPlan], experts: dict[int, int]) -> None:
        self.wires, self.experts = wires, experts
        self.lost: list[int] = []
        self.losses = 0  # ever
        self.watch: Watch | None = None
        self.follow(plans)

    def follow(self, plans: dict[int, SlotPlan]) -> None:
        """From now on rows go where these plans say, but never to a rank that was lost."""
        self.wanted = plans
        for rank in self.lost:
            plans = {layer: without_rank(plan, rank) for layer, plan in plans.items()}
        self.plans = plans
        self.holders = {layer: Holders(plan, self.experts[layer]) for layer, plan in plans.items()}

    def change(self, changes: Changes) -> None:
        """Some slots hold other experts from now on."""
        moved = {layer: after(self.plans[layer], moves) for layer, moves in changes.items()}
        self.follow(self.plans | moved)

    def rejoin(self, rank: int, wire: Wire) -> None:
        """A rank that was lost is there again, or one in its place: the plan is what it was."""
        self.wires[rank] = wire
        self.lost = [other for other in self.lost if other != rank]
        self.follow(self.wanted)

    def keep(self, layers: Iterable[int]) -> int:
        """Tell expert ranks to hold what the plans say, and wait until they do; how many experts were read for it."""
        read = 0
        for layer in layers:
            for rank, wire in self.wires.items():
                if wire.lost is None:
                    try:
                        read += self._keep(wire, layer, self.plans[layer].slots[rank])
                    except RankLost as error:
                        self._leave_out(rank, error)
        return read

    @staticmethod
    def _keep(wire: Wire, layer: int, experts: Sequence[int]) -> int:
        for work, _ in wire.send(head_tensor(Head(KEEP, layer, rows=len(experts))), torch.tensor(experts)):
            wire.settle(work)
        return int(wire.receive(torch.empty(1, dtype=torch.int64), timedelta(seconds=READ_SECONDS)))

    def stats(self) -> dict[int, ExpertRankStats]:
        """Of the expert ranks that are there, between two steps."""
        found = {}
        for rank in tell(self.wires, Head(STATS)):
            try:
                numbers = self.wires[rank].receive(torch.empty(len(ExpertRankStats._fields), dtype=torch.int64))
                found[rank] = ExpertRankStats(*numbers.tolist())
            except RankLost as error:
                self._leave_out(rank, error)
        return found

    def begin(self, x_TD: Tensor, routes: Routes, layer: int, micro: MicroBatch) -> Callable[[], Tensor]:
        """Rows leave; what this returns waits for the answers and adds them up."""
        if not len(x_TD):
            return lambda: x_TD
        experts_TK = routes.experts_TK.cpu()
        x_here_TD, weights_A = x_TD.cpu(), routes.weights_TK.reshape(-1).cpu()
        rank_A = self.holders[layer].choose(experts_TK, micro.turn + layer).reshape(-1)
        sent = self._ask(x_here_TD, experts_TK, weights_A, rank_A, layer, micro)

        def finish() -> Tensor:
            nonlocal sent
            y_AD = x_here_TD.new_empty(experts_TK.numel(), x_here_TD.shape[1])
            while sent:
                missing = [one.index_A for one in sent if not self._arrived(one, y_AD)]
                sent = []
                if missing:  # by then their rank is known to be lost
                    rank_A = self.holders[layer].choose(experts_TK, micro.turn + layer).reshape(-1)
                    again_A = torch.cat(missing)
                    alone = micro._replace(askers=0)
                    sent = self._ask(x_here_TD, experts_TK, weights_A, rank_A, layer, alone, again_A)
            return add_in_order(y_AD.view(*experts_TK.shape, -1), experts_TK).to(x_TD)

        return finish

    def _ask(
        self,
        x_TD: Tensor,
        experts_TK: Tensor,
        weights_A: Tensor,
        rank_A: Tensor,
        layer: int,
        micro: MicroBatch,
        among_A: Tensor | None = None,
    ) -> list[_Sent]:
        """Of each rank what it holds, or of the assignments in `among_A`. One with which several attention ranks will
        speak is told also that there is nothing."""
        per_token, flat_A = experts_TK.shape[1], experts_TK.reshape(-1)
        sent = []
        for rank, wire in self.wires.items():
            index_A = (rank_A == rank).nonzero().squeeze(1)
            if among_A is not None:
                index_A = among_A[rank_A[among_A] == rank]
            if not len(index_A) and (wire.lost is not None or micro.askers & (micro.askers - 1) == 0):
                continue
            token_P, row_A = torch.unique(index_A // per_token, return_inverse=True)
            answer_AD = x_TD.new_empty(len(index_A), x_TD.shape[1])
            head = Head(ROWS, layer, micro.number, len(token_P), len(index_A), micro.askers)
            work, leaving = None, list[tuple[Any, Tensor]]()
            try:
                leaving = wire.send(head_tensor(head))
                if len(index_A):
                    rows_PD = x_TD.index_select(0, token_P)
                    leaving += wire.send(question(rows_PD, flat_A[index_A], row_A, weights_A[index_A]))
                    work = wire.begin_receive(answer_AD)
            except RankLost as error:
                self._leave_out(rank, error)
            sent.append(_Sent(rank, index_A, answer_AD, work, leaving))
        return sent

    def _arrived(self, one: _Sent, y_AD: Tensor) -> bool:
        """Whether the answer came; it is put where it belongs."""
        wire = self.wires[one.rank]
        try:
            for work, _ in one.leaving:
                wire.settle(work)
            if one.work is not None:
                wire.settle(one.work)
                y_AD[one.index_A] = one.answer_AD
        except RankLost as error:
            self._leave_out(one.rank, error)
        return wire.lost is None or not len(one.index_A)

    def _leave_out(self, rank: int, error: RankLost) -> None:
        if rank in self.lost:
            return
        logger.error("expert rank %d is gone, others take its experts: %s", rank, error)
        self.lost.append(rank)
        self.losses += 1
        self.follow(self.wanted)


class AwayKernels(WrappedKernels):
    """`micro` is the micro-batch that a forward over these kernels is of. `share` says which rows this rank asks for,
    of all that it knows, and `gather` brings together what the ranks that divide them got."""

    def __init__(
        self,
        plain: Kernels,
        away: ExpertsAway,
        micro: MicroBatch = WHOLE,
        share: Callable[[int], slice] | None = None,
        gather: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__(plain)
        self.away, self.micro, self.share, self.gather = away, micro, share, gather

    def of(self, micro: MicroBatch) -> Self:
        """The same for another micro-batch."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__, micro=micro)
        return bound

    def begin_experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Callable[[], Tensor]:
        layer, rows = layer_of(weights.site), len(x_TD)
        share, gather = self.share, self.gather
        if share is None or gather is None:
            return self.away.begin(x_TD, routes, layer, self.micro)
        own = share(rows)
        finish = self.away.begin(x_TD[own], Routes(routes.experts_TK[own], routes.weights_TK[own]), layer, self.micro)
        return lambda: gather(finish(), rows)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        return self.begin_experts(x_TD, routes, weights)()


def layer_of(site: str) -> int:
    """`layers.3.ffn`: 3."""
    return int(site.split(".")[1])


def plans_for(experts: dict[int, int], ranks: int, slots: dict[int, int]) -> dict[int, SlotPlan]:
    """Before anything was measured: of each layer's experts so many on every rank."""
    return {layer: SlotPlan.even(count, ranks, slots[layer]) for layer, count in experts.items()}
