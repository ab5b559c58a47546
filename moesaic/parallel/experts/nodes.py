"""Dispatch by nodes (X-MoE's pilot): a token that several experts of a node want crosses the network once, each way.

It goes to the rank of that node that has the place there which its own rank has here, and from there over the node's
own links to the ranks of its experts, a row for each. Experts lie on ranks in order and ranks on nodes in order. A
token's sum is taken by node first, so the last bits are not one process's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.parallel.experts.bypass import begin_experts_once
from moesaic.parallel.experts.dispatch import Compute, Finish, begin_experts
from moesaic.parallel.experts.exchange import Exchange


@dataclass(frozen=True)
class NodeExchange:
    """`between`: the ranks with this one's place on other nodes; `within`: those of this node."""

    between: Exchange
    within: Exchange

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, size: int) -> NodeExchange:
        """A group's ranks as nodes of `size`, in their order; made by all of them together."""
        whole = Exchange(group)
        if whole.ranks % size:
            raise UserError(
                "dispatch by nodes", f"{whole.ranks} ranks are not whole nodes of {size}", "Say node_ranks=..."
            )
        ranks, first = dist.get_process_group_ranks(whole.group), whole.rank - whole.rank % size
        members = ranks[whole.rank % size :: size], ranks[first : first + size]
        return cls(*(Exchange(dist.new_group(part, use_local_synchronization=True)) for part in members))


def begin_experts_by_node(
    x_TD: Tensor, routes: Routes, here: int, exchange: NodeExchange, compute: Compute, chunks: int = 1
) -> Finish:
    """`here`: experts of each rank."""

    def within_node(rows: Dispatched, first: int, last: int) -> Tensor:
        wanted_A1 = torch.arange(last - first, device=x_TD.device).repeat_interleave(rows.counts_E).unsqueeze(1)
        # Every assignment stands for a token of one expert; nothing is added up yet.
        return begin_experts(rows.x_AD, Routes(wanted_A1, rows.weights_A1), here, exchange.within, compute, chunks)()

    return begin_experts_once(x_TD, routes, here * exchange.within.ranks, exchange.between, within_node)


def expected_crossings(experts: int, per_token: int, places: int, once: bool) -> float:
    """How many rows of a token leave its place, be that a rank or a node, if routing is random: one for each expert
    elsewhere, or `once` for each other place that holds any of its experts."""
    elsewhere = experts - experts // places
    if not once:
        return per_token * elsewhere / experts
    return (places - 1) * (1 - comb(elsewhere, per_token) / comb(experts, per_token))
