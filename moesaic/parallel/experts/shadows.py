"""FasterMoE's shadowing: weights of the experts that most tokens want go to all ranks, and their tokens stay at home.

Which experts are hot is read from the counts of the forward before, which all ranks have added up (once per forward,
for all layers), so that all choose the same. The owner sends an expert's weights to everyone, and everyone's gradient
of them is added up at the owner: parameters, optimizer and checkpoints know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.kernels import reference
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.parallel.experts.dispatch import Compute, Finish, begin_rows, inverse
from moesaic.parallel.experts.exchange import Exchange


def bytes_of_tokens(count: float, ranks: int, row_bytes: int) -> float:
    """What an expert's tokens cost in a step where it does not lie: to its rank and back, and so their gradients."""
    return 4 * count * (ranks - 1) / ranks * row_bytes


def bytes_of_weights(numbers: int, element_size: int, ranks: int) -> int:
    """What the expert itself costs: weights to everyone, and gradients from everyone in float32."""
    return (ranks - 1) * numbers * (element_size + 4)


def hot_experts(counts: Sequence[int], most: int, worth: Callable[[int], bool] = lambda count: True) -> list[int]:
    """At most so many experts, those with most tokens, as far as they are `worth` it; in their own order."""
    by_load = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
    return sorted(expert for expert in by_load[:most] if counts[expert] and worth(counts[expert]))


class Shadows:
    """What ranks know of each layer's load. `sent_bytes`: weights that left this rank in forward passes."""

    def __init__(self, exchange: Exchange, most: int | Literal["auto"]) -> None:
        self.exchange, self.most = exchange, most
        self.sent_bytes = 0
        self._seen: dict[str, Tensor] = {}  # since ranks last agreed: this rank's counts, by the layer's site
        self._known: dict[str, list[int]] = {}

    def note(self, site: str, counts_E: Tensor) -> None:
        self._seen[site] = counts_E

    def agree(self) -> dict[str, list[int]]:
        """All ranks' counts of the last forward, by layer. Called by all at the same places: before a forward."""
        if self._seen:
            total_N = torch.cat(list(self._seen.values()))
            dist.all_reduce(total_N, group=self.exchange.group)
            sizes = [len(counts_E) for counts_E in self._seen.values()]
            totals = [part.tolist() for part in total_N.split(sizes)]
            self._known = {**self._known, **dict(zip(self._seen, totals, strict=True))}
            self._seen.clear()
        return self._known

    def hot(self, counts: Sequence[int], weights: ExpertWeights) -> list[int]:
        if self.most != "auto":
            return hot_experts(counts, self.most)
        ranks, gate_up_GD, down_DF = self.exchange.ranks, weights.gate_up_EGD[0], weights.down_EDF[0]
        size = gate_up_GD.element_size()
        price = bytes_of_weights(gate_up_GD.numel() + down_DF.numel(), size, ranks)
        row_bytes = len(down_DF) * size
        return hot_experts(counts, len(counts), lambda count: bytes_of_tokens(count, ranks, row_bytes) > price)

    def begin(self, weights: ExpertWeights, hot: list[int]) -> Callable[[], ExpertWeights]:
        """Weights of hot experts set out to all ranks; what this returns waits for them."""
        own = weights.gate_up_EGD, weights.down_EDF
        exchange, here = self.exchange, len(own[0])
        with torch.no_grad():
            flat_HP = own[0].new_empty(len(hot), own[0][0].numel() + own[1][0].numel())
            for row_P, expert in zip(flat_HP, hot, strict=True):
                if expert // here == exchange.rank:
                    row_P.copy_(torch.cat([part[expert % here].reshape(-1) for part in own]))
                    self.sent_bytes += (exchange.ranks - 1) * row_P.numel() * row_P.element_size()
            sent = [
                dist.broadcast(row_P, group=exchange.group, group_src=expert // here, async_op=True)
                for row_P, expert in zip(flat_HP, hot, strict=True)
            ]

        def arrived() -> ExpertWeights:
            for work in sent:
                work.wait()
            gate_up_HGD, down_HDF = _Shadow.apply(*own, flat_HP, hot, exchange)
            return replace(weights, gate_up_EGD=gate_up_HGD, down_EDF=down_HDF)

        return arrived


class _Shadow(torch.autograd.Function):
    """Copies of experts that are here by now; their gradients are added up where the experts are."""

    @staticmethod
    def forward(
        ctx: Any, gate_up_EGD: Tensor, down_EDF: Tensor, flat_HP: Tensor, hot: list[int], exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        ctx.shapes, ctx.hot, ctx.exchange = (gate_up_EGD.shape, down_EDF.shape), hot, exchange
        parts = flat_HP.split([gate_up_EGD[0].numel(), down_EDF[0].numel()], 1)
        gate_up_HGD, down_HDF = (
            part.contiguous().view(len(hot), *shape[1:]) for part, shape in zip(parts, ctx.shapes, strict=True)
        )
        return gate_up_HGD, down_HDF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, hot, here = ctx.exchange, ctx.hot, ctx.shapes[0][0]
        flat_HP = torch.cat([grad.reshape(len(hot), -1) for grad in grads], 1).float()
        sent = [
            dist.reduce(row_P, group=exchange.group, group_dst=expert // here, async_op=True)
            for row_P, expert in zip(flat_HP, hot, strict=True)
        ]
        for work in sent:
            work.wait()
        found = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        for row_P, expert in zip(flat_HP, hot, strict=True):
            if expert // here == exchange.rank:
                parts = row_P.split([whole[0].numel() for whole in found])
                for whole, part in zip(found, parts, strict=True):
                    whole[expert % here] = part.view(whole.shape[1:])
        return found[0], found[1], None, None, None


def begin_experts_shadowed(
    x_TD: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    hot: list[int],
    shadows: Shadows,
    compute: Compute,
    plain: Callable[[Dispatched, ExpertWeights], Tensor],
    chunks: int = 1,
) -> Finish:
    """As `begin_experts`, but rows of hot experts are computed here, by `plain`, while the others travel."""
    here, exchange = len(weights.gate_up_EGD), shadows.exchange
    sent = reference.dispatch(x_TD, routes, here * exchange.ranks)
    shadows.note(weights.site, sent.counts_E)
    hot_H = torch.tensor(hot, dtype=torch.int64, device=x_TD.device)
    is_hot_E = torch.zeros_like(sent.counts_E, dtype=torch.bool).index_fill(0, hot_H, True)
    stays_A = is_hot_E.repeat_interleave(sent.counts_E)
    leave_A, stay_A = (~stays_A).nonzero().squeeze(1), stays_A.nonzero().squeeze(1)

    def part(index_A: Tensor, counts: Tensor) -> Dispatched:
        x_AD, weights_A1, token_A = (
            rows.index_select(0, index_A) for rows in (sent.x_AD, sent.weights_A1, sent.token_A)
        )
        return Dispatched(x_AD, weights_A1, counts, token_A, sent.tokens)

    arrived = shadows.begin(weights, hot) if hot else None
    finish_others = begin_rows(part(leave_A, sent.counts_E.masked_fill(is_hot_E, 0)), here, exchange, compute, chunks)

    def finish() -> Tensor:
        stay = [] if arrived is None else [plain(part(stay_A, sent.counts_E[hot_H]), arrived())]
        y_AD = torch.cat([*stay, finish_others()]).index_select(0, inverse(torch.cat([stay_A, leave_A])))
        return reference.combine(y_AD, sent)

    return finish
