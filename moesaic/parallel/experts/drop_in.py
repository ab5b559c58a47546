"""FastMoE's drop-in: any expert modules, in any PyTorch model, on as many ranks as there are.

    from moesaic.parallel import ExpertParallel

    experts = [nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, d)) for _ in range(experts_per_rank)]
    layer = ExpertParallel(experts)              # on every rank: its own experts, those from rank * experts_per_rank on
    y_TD = layer(x_TD, experts_TK, weights_TK)   # from any router: K experts of each token, and their weights

Tokens go to the ranks of their experts and come back; an expert that nobody chose, or a rank without tokens, holds up
nobody. Expert parameters are this rank's own: do not average their gradients over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.parallel.experts.bypass import begin_experts_once
from moesaic.parallel.experts.dispatch import begin_experts
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.nodes import NodeExchange, begin_experts_by_node
from moesaic.parallel.layout import ranks_per_node


class ExpertParallel(nn.Module):
    """`chunks`: groups of experts whose rows travel while others compute; `dispatch` as in `ExpertParallelKernels`,
    by nodes of `node_ranks`, or as many as torchrun started."""

    def __init__(
        self,
        experts: Sequence[nn.Module],
        group: dist.ProcessGroup | None = None,
        *,
        chunks: int = 1,
        dispatch: Literal["plain", "once", "node"] = "plain",
        node_ranks: int = 0,
    ) -> None:
        super().__init__()
        if not experts:
            raise UserError("ExpertParallel", "no experts were given", "Every rank holds as many, one at least.")
        self.experts = nn.ModuleList(experts)
        self.exchange = Exchange(group)
        self.chunks, self.dispatch = chunks, dispatch
        self.nodes = NodeExchange.of(group, node_ranks or ranks_per_node()) if dispatch == "node" else None

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        here = len(self.experts)
        if experts_TK.shape != weights_TK.shape or len(experts_TK) != len(x_TD):
            shapes = f"{tuple(x_TD.shape)}, {tuple(experts_TK.shape)}, {tuple(weights_TK.shape)}"
            raise UserError(
                "ExpertParallel", f"rows, experts and weights do not agree: {shapes}", "Give (T, D), (T, K), (T, K)."
            )
        if experts_TK.numel() and not 0 <= int(experts_TK.min()) <= int(experts_TK.max()) < here * self.exchange.ranks:
            most = here * self.exchange.ranks - 1
            raise UserError(
                "ExpertParallel", f"an expert outside 0 to {most} was chosen", "Does the router know them all?"
            )
        routes = Routes(experts_TK, weights_TK)
        if self.nodes is not None:
            return begin_experts_by_node(x_TD, routes, here, self.nodes, self._compute, self.chunks)()
        if self.dispatch == "once":
            return begin_experts_once(x_TD, routes, here, self.exchange, self._compute)()
        return begin_experts(x_TD, routes, here, self.exchange, self._compute, self.chunks)()

    def _compute(self, rows: Dispatched, first: int, last: int) -> Tensor:
        parts = rows.x_AD.split(rows.counts_E.tolist())
        results = [expert(part) for expert, part in zip(self.experts[first:last], parts, strict=True)]
        return torch.cat(results) * rows.weights_A1
