"""Mesh-Attention: a rank computes a tile of query blocks by key blocks, and ranks merge what they found.

Blocks travel straight from their rank to those that need them, in the order of `mesh_schedule`, while others are
computed; a block that nobody may look at does not travel. What travels for keys and values is `carried`: they
themselves, or latents that every rank expands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.parallel.context.block_attention import (
    Findings,
    Given,
    PlainRunAttention,
    Rule,
    RunAttention,
    visible_runs,
)
from moesaic.parallel.context.mesh_schedule import Costs, Kind, Step, Transfer, greedy_schedule
from moesaic.parallel.context.mesh_tiles import Place, RowBytes, Tile
from moesaic.parallel.rows import RowGroup, RowSplit

# Keys and values of what was carried, and of weights that belong to every block.
Open = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Mesh:
    """Attention of one batch over a grid of ranks."""

    split: RowSplit
    ranks: RowGroup
    tile: Tile
    rule: Rule
    row: RowBytes
    open: Open
    kernel: RunAttention = field(default_factory=PlainRunAttention)

    def attend(self, q_THC: Tensor, carried_T: Tensor, *weights: Tensor) -> Tensor:
        return cast(Tensor, _MeshAttention.apply(self, q_THC.contiguous(), carried_T.contiguous(), *weights))

    @property
    def place(self) -> Place:
        return Place(self.ranks.rank, self.tile)

    def schedule(self, *, backward: bool) -> tuple[Step, ...]:
        row = self.row
        if backward:
            brought = row.queries + row.outputs + 2 * row.sums
            return greedy_schedule(self.tile, Costs(brought, row.keys_values, row.queries, row.keys_values))
        return greedy_schedule(self.tile, Costs(row.queries, row.keys_values, row.outputs + row.sums))

    def sees(self, query_rank: int, key_rank: int) -> bool:
        return bool(self.runs(query_rank, key_rank))

    def runs(self, query_rank: int, key_rank: int) -> tuple[tuple[slice, slice, int], ...]:
        window, kept = self.rule.window, self.split.kept
        asked = query_rank, key_rank, window
        if asked not in kept:
            kept[asked] = tuple(visible_runs(self.split.runs[query_rank], self.split.runs[key_rank], window))
        found: tuple[tuple[slice, slice, int], ...] = kept[asked]
        return found

    def uses(self, rank: int, kind: Kind, number: int) -> bool:
        """Whether a rank's tile has anything to compute with one of its blocks."""
        place = Place(rank, self.tile)
        if kind in ("queries", "query results"):
            return any(self.sees(place.across(number), place.down(key)) for key in range(self.tile.keys))
        return any(self.sees(place.across(query), place.down(number)) for query in range(self.tile.queries))


class _Transfers:
    """A tile's transfers: what was begun, and what has come."""

    def __init__(self, mesh: Mesh, *, backward: bool) -> None:
        self.mesh, self.backward = mesh, backward
        self.begun: dict[Transfer, tuple[list[Any], list[Tensor] | None, list[Tensor]]] = {}

    def begin(
        self, transfer: Transfer, outgoing: Callable[[], list[Tensor]], like: list[Tensor], rows_like: int
    ) -> None:
        """`outgoing` makes what leaves; `like` are tensors as they come, but for the number of rows: that of the rank
        they come from, or where results come back (`rows_like`) this rank's."""
        mesh, (kind, number), place = self.mesh, transfer, self.mesh.place
        step = place.across if kind in ("queries", "query results") else place.down
        if kind in ("queries", "keys"):
            target, source = step(-number), step(number)
            leaves, comes = mesh.uses(target, kind, number), mesh.uses(place.rank, kind, number)
            rows = mesh.split.counts[source]
        else:
            target, source = step(number), step(-number)
            leaves, comes = mesh.uses(place.rank, kind, number), mesh.uses(source, kind, number)
            rows = rows_like
        sent = [part.contiguous() for part in outgoing()] if leaves else []
        found = [part.new_empty(rows, *part.shape[1:]) for part in like] if comes else None
        group, tag = mesh.ranks.group, 4 * len(self.begun)
        peers = [dist.get_global_rank(group, rank) for rank in (target, source)]
        ops = [dist.P2POp(dist.isend, part, peers[0], group, tag + at) for at, part in enumerate(sent)]
        ops += [dist.P2POp(dist.irecv, part, peers[1], group, tag + at) for at, part in enumerate(found or [])]
        works = dist.batch_isend_irecv(ops) if ops else []
        mesh.ranks.traffic.count(sum(part.numel() * part.element_size() for part in sent), backward=self.backward)
        self.begun[transfer] = works, found, sent

    def take(self, kind: Kind, number: int) -> list[Tensor] | None:
        """What a transfer brought, once it is there, and once only; None where nothing was to come."""
        works, found, _ = self.begun[Transfer(kind, number)]
        for work in works:
            work.wait()
        self.begun[Transfer(kind, number)] = [], None, []  # whoever took it lets go of it
        return found

    def finish(self) -> None:
        """What was sent must have left before its memory is used again."""
        for transfer in list(self.begun):
            self.take(*transfer)


class _MeshAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: Mesh, q_THC: Tensor, carried_T: Tensor, *weights: Tensor) -> Tensor:
        transfers, place = _Transfers(mesh, backward=False), mesh.place
        queries, keys = {0: q_THC}, {0: mesh.open(carried_T, *weights)}
        value_size = keys[0][1].shape[2]
        found: dict[int, Findings] = {}
        left = dict.fromkeys(range(mesh.tile.keys), mesh.tile.queries)  # blocks that will still look at these keys

        def findings(number: int) -> Findings:
            if number not in found:
                if number:
                    (queries[number],) = cast("list[Tensor]", transfers.take("queries", number))
                found[number] = Findings.none(queries[number], value_size)
            return found[number]

        def result(number: int) -> list[Tensor]:
            done = found.pop(number)
            del queries[number]
            return [done.out_THV.to(q_THC.dtype), done.sums_TH]

        sums_TH = q_THC.new_empty(*q_THC.shape[:2], dtype=torch.float32)
        out_THV = q_THC.new_empty(*q_THC.shape[:2], value_size)
        for transfer, blocks in mesh.schedule(backward=False):
            if transfer is not None and transfer.kind == "queries":
                transfers.begin(transfer, lambda: [q_THC], [q_THC], 0)
            elif transfer is not None and transfer.kind == "keys":
                transfers.begin(transfer, lambda: [carried_T], [carried_T], 0)
            elif transfer is not None:
                transfers.begin(transfer, partial(result, transfer.number), [out_THV, sums_TH], len(q_THC))
            for query, key in blocks:
                ranks = place.across(query), place.down(key)
                if not mesh.sees(*ranks):
                    continue
                if key not in keys:
                    keys[key] = mesh.open(*cast("list[Tensor]", transfers.take("keys", key)), *weights)
                into, (k_MNC, v_MNV) = findings(query), keys[key]
                for rows, seen, offset in mesh.runs(*ranks):
                    into.add(
                        *mesh.kernel.forward(queries[query][rows], k_MNC[seen], v_MNV[seen], offset, mesh.rule), rows
                    )
            for _, key in blocks:
                left[key] -= 1
                if not left[key]:
                    keys.pop(key, None)
        own = findings(0)
        for number in range(1, mesh.tile.queries):
            if (came := transfers.take("query results", number)) is not None:
                own.add(came[0], came[1])
        transfers.finish()
        out_THV = own.out_THV.to(q_THC.dtype)
        ctx.mesh = mesh
        ctx.save_for_backward(q_THC, carried_T, out_THV, own.sums_TH, *weights)
        return out_THV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mesh: Mesh = ctx.mesh
        q_THC, carried_T, out_THV, sums_TH, *weights = ctx.saved_tensors
        products_TH = (grads[0].float() * out_THV.float()).sum(-1)
        transfers, place = _Transfers(mesh, backward=True), mesh.place
        own = Given(q_THC, grads[0].contiguous(), sums_TH, products_TH)
        queries: dict[int, tuple[Given, Tensor]] = {0: (own, torch.zeros_like(q_THC, dtype=torch.float32))}
        keys = {0: _Opened(mesh.open, carried_T, weights)}
        d_weights = [torch.zeros_like(weight) for weight in weights]

        def query_result(number: int) -> list[Tensor]:
            return [queries.pop(number)[1].to(q_THC.dtype)]

        def key_result(number: int) -> list[Tensor]:
            d_carried_T, *more = keys.pop(number).gradients()
            for total, part in zip(d_weights, more, strict=True):
                total += part
            return [d_carried_T]

        for transfer, blocks in mesh.schedule(backward=True):
            if transfer is None:
                pass
            elif transfer.kind == "queries":
                transfers.begin(transfer, lambda: list(own), list(own), 0)
            elif transfer.kind == "keys":
                transfers.begin(transfer, lambda: [carried_T], [carried_T], 0)
            elif transfer.kind == "query results":
                transfers.begin(transfer, partial(query_result, transfer.number), [q_THC], len(q_THC))
            else:
                transfers.begin(transfer, partial(key_result, transfer.number), [carried_T], len(q_THC))
            for query, key in blocks:
                ranks = place.across(query), place.down(key)
                if not mesh.sees(*ranks):
                    continue
                if query not in queries:
                    given = Given(*cast("list[Tensor]", transfers.take("queries", query)))
                    queries[query] = given, torch.zeros_like(given.q_THC, dtype=torch.float32)
                if key not in keys:
                    (came_T,) = cast("list[Tensor]", transfers.take("keys", key))
                    keys[key] = _Opened(mesh.open, came_T, weights)
                (given, d_q_THC), opened = queries[query], keys[key]
                for rows, seen, offset in mesh.runs(*ranks):
                    parts = mesh.kernel.backward(
                        given.rows(rows), opened.k_MNC[seen], opened.v_MNV[seen], offset, mesh.rule
                    )
                    d_q_THC[rows] += parts[0]
                    opened.d_k_MNC[seen] += parts[1]
                    opened.d_v_MNV[seen] += parts[2]
        d_q_THC = queries[0][1]
        for number in range(1, mesh.tile.queries):
            if (came := transfers.take("query results", number)) is not None:
                d_q_THC += came[0]
        d_carried_T = key_result(0)[0].float()
        for number in range(1, mesh.tile.keys):
            if (came := transfers.take("key results", number)) is not None:
                d_carried_T += came[0]
        transfers.finish()
        return None, d_q_THC.to(q_THC.dtype), d_carried_T.to(carried_T.dtype), *d_weights


class _Opened:
    """Keys and values of a block in a backward pass, and the gradients that are found for them."""

    def __init__(self, open_: Open, carried_T: Tensor, weights: list[Tensor]) -> None:
        with torch.enable_grad():
            self.leaves = [part.detach().requires_grad_() for part in (carried_T, *weights)]
            self.out = open_(*self.leaves)
        self.k_MNC, self.v_MNV = (part.detach() for part in self.out)
        self.d_k_MNC, self.d_v_MNV = (torch.zeros_like(part, dtype=torch.float32) for part in self.out)

    def gradients(self) -> tuple[Tensor, ...]:
        given = self.d_k_MNC.to(self.k_MNC.dtype), self.d_v_MNV.to(self.v_MNV.dtype)
        return torch.autograd.grad(self.out, self.leaves, given)
