"""The model's experts on other ranks: kernels in which `experts` is dispatch, compute here, and combine.

    model.ops = ExpertParallelKernels(model.ops, Exchange(group), chunks=2)

The model itself holds this rank's experts only and knows nothing of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from moesaic.kernels.interface import Batch, Dispatched, Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.wrapped import WrappedKernels, for_batch
from moesaic.parallel.experts.bypass import begin_experts_once
from moesaic.parallel.experts.dispatch import Finish, begin_experts
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.nodes import NodeExchange, begin_experts_by_node
from moesaic.parallel.experts.shadows import Shadows, begin_experts_shadowed


class Travelling:
    """Rows on their way. An object, not a closure: a compiled layer knows it by its type and is not compiled anew."""

    def __init__(self, finish: Finish) -> None:
        self._finish = finish

    @torch.compiler.disable  # a collective has no place in a compiled layer
    def __call__(self) -> Tensor:
        return self._finish()


class ExpertParallelKernels(WrappedKernels):
    """`dispatch`: `plain` has the bits of one process with all tokens at once; `once` sends a token to a rank once, and
    sums there; `node` to a node once, for which `nodes` tells its ranks from the others. `exact` takes the ranks' rows
    one rank after the other: the bits of one process that accumulates their batches.
    `shadow`: so many experts that most tokens want, or those that pay (`auto`), are copied to all ranks in every
    forward. The last two go with plain `dispatch` only, and not with each other."""

    def __init__(
        self,
        plain: Kernels,
        exchange: Exchange,
        *,
        chunks: int = 1,
        dispatch: Literal["plain", "once", "node"] = "plain",
        nodes: NodeExchange | None = None,
        exact: bool = False,
        shadow: int | Literal["auto"] = 0,
    ) -> None:
        super().__init__(plain)
        self.exchange, self.chunks, self.exact = exchange, chunks, exact
        self.dispatch, self.nodes = dispatch, nodes
        self.shadows = Shadows(exchange, shadow) if shadow else None
        self.loads: dict[str, list[int]] = {}  # all ranks' counts of the forward before this one, by layer

    def for_batch(self, layout: Batch, rows: int | None = None) -> Self:
        bound = super().for_batch(layout, rows)
        if self.shadows is not None:  # which experts are hot stays as it is until this forward's backward is through
            bound = object.__new__(type(self))
            bound.__dict__.update(self.__dict__, plain=for_batch(self.plain, layout, rows), loads=self.shadows.agree())
        return bound

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        return self.begin_experts(x_TD, routes, weights)()

    @torch.compiler.disable
    def begin_experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Travelling:
        """Rows leave; what this returns computes those that arrive, and waits for the others' answers."""
        here = len(weights.gate_up_EGD)

        def compute(rows: Dispatched, first: int, last: int) -> Tensor:
            own = replace(weights, gate_up_EGD=weights.gate_up_EGD[first:last], down_EDF=weights.down_EDF[first:last])
            return self.plain.compute_experts(rows, own)

        if self.shadows is not None:
            counts = self.loads.get(weights.site)
            hot = self.shadows.hot(counts, weights) if counts is not None else []
            plain = self.plain.compute_experts
            return Travelling(
                begin_experts_shadowed(x_TD, routes, weights, hot, self.shadows, compute, plain, self.chunks)
            )
        if self.dispatch == "node":
            assert self.nodes is not None
            return Travelling(begin_experts_by_node(x_TD, routes, here, self.nodes, compute, self.chunks))
        if self.dispatch == "once":
            return Travelling(begin_experts_once(x_TD, routes, here, self.exchange, compute))
        return Travelling(begin_experts(x_TD, routes, here, self.exchange, compute, self.chunks, self.exact))
