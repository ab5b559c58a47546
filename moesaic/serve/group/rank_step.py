"""One rank's part of a step: the forward of its data-parallel rank's requests, and what rank 0 wants of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moesaic.kernels.adapted import AdaptedKernels
from moesaic.kernels.interface import Kernels
from moesaic.model.config import Experts
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.layout import Layout, PagedCache
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter, rows_by_adapter
from moesaic.serve.core.forward_pass import tree_TT
from moesaic.serve.group.kernels import GroupKernels
from moesaic.serve.group.shares import widths
from moesaic.serve.group.step_array import Piece, spans_of
from moesaic.serve.group.worker_group import WorkerGroup


class StepResult(NamedTuple):
    """On rank 0 of all requests, elsewhere only what was computed here. Rows of `hidden_TD` that nobody asked for are
    there only if they were computed on rank 0's own data-parallel rank."""

    hidden_TD: Tensor
    logits_NV: Tensor  # of the wanted rows, in their order
    routing: Routing


class RankStep:
    def __init__(self, model: Model, group: WorkerGroup, cache: PagedCache) -> None:
        self.model, self.group, self.cache = model, group, cache
        self.kernels = cast(GroupKernels, model.ops)
        self.mixtures = [n for n, layer in enumerate(model.config.layers) if isinstance(layer.ffn, Experts)]

    def run(self, pieces: Sequence[Piece], adapters: dict[int, Adapter]) -> StepResult:
        """`pieces` of all data-parallel ranks, sorted by them."""
        model, group = self.model, self.group
        self.kernels.steps += 1
        own = [piece for piece in pieces if piece.dp == group.dp]
        layout, routing = self._layout(own), Routing()
        tokens_T = torch.tensor([t for piece in own for t in piece.tokens], dtype=torch.int64, device=model.device)
        x_TD, context = model.begin(tokens_T, layout, routing, self._ops(own, layout, adapters))
        hidden_TD = model.finish(self._run_layers(x_TD, context, pieces, adapters), context)
        logits_NV = self._logits(pieces, own, hidden_TD)
        if group.layout.dp > 1:
            hidden_TD, routing = self._collect(pieces, own, hidden_TD, routing)
        return StepResult(hidden_TD, logits_NV, routing)

    def _run_layers(
        self, x_TD: Tensor, context: ForwardContext, pieces: Sequence[Piece], adapters: dict[int, Adapter]
    ) -> Tensor:
        """Where experts are elsewhere, otherwise."""
        return self.model.run_layers(x_TD, context)

    def _layout(self, own: Sequence[Piece]) -> Layout:
        device, positions, trees = self.model.device, None, None
        if any(piece.parents for piece in own):
            positions = torch.tensor([place for piece in own for place in piece.positions()], device=device)
            trees = [
                tree_TT(len(piece.tokens) - len(piece.parents), piece.parents) if piece.parents else None
                for piece in own
            ]
        return Layout(
            [len(piece.tokens) for piece in own],
            cached=[piece.cached for piece in own],
            cache=self.cache,
            pages=[piece.pages for piece in own],
            positions=positions,
            trees=trees,
            device=device,
        )

    def _ops(self, own: Sequence[Piece], layout: Layout, adapters: dict[int, Adapter]) -> Kernels:
        if all(piece.adapter < 0 for piece in own):
            return cast(Kernels, self.kernels)
        used = [(adapters.get(p.adapter), range(s.start, s.stop)) for p, s in zip(own, layout.spans, strict=True)]
        adapted = AdaptedKernels(self.kernels.plain, rows_by_adapter(used, self.model.device))
        return cast(Kernels, self.kernels.over(cast(Kernels, adapted)))

    def _logits(self, pieces: Sequence[Piece], own: Sequence[Piece], hidden_TD: Tensor) -> Tensor:
        """At rank 0 from all ranks: the rows of each data-parallel rank, the columns of each tensor rank."""
        model, group, tp = self.model, self.group, self.group.layout.tp
        rows = [span.start + row for piece, span in zip(own, spans_of(own), strict=True) for row in piece.wanted]
        at_N = torch.tensor(rows, dtype=torch.int64, device=model.device)
        own_NV = self.kernels.plain.linear(hidden_TD[at_N], model.output, None, model.output_site)
        columns = widths(model.config.vocab, tp)
        counts = [sum(len(p.wanted) for p in pieces if p.dp == dp) for dp in range(group.layout.dp)]
        shapes = [(counts[rank // tp], columns[rank % tp]) for rank in range(group.ranks)]
        found = group.world.to_first(own_NV, shapes, "logits")
        if not found:
            return own_NV
        return torch.cat([torch.cat(found[start : start + tp], 1) for start in range(0, group.ranks, tp)])

    def _collect(
        self, pieces: Sequence[Piece], own: Sequence[Piece], hidden_TD: Tensor, routing: Routing
    ) -> tuple[Tensor, Routing]:
        """At rank 0 the choices of experts and the wanted hidden states of the other data-parallel ranks."""
        group, tp = self.group, self.group.layout.tp
        first = group.tp == 0  # of a data-parallel rank's tensor ranks, one sends
        counts = [sum(len(p.tokens) for p in pieces if p.dp == dp) for dp in range(group.layout.dp)]
        if self.mixtures:
            chosen_TX = torch.cat([routing.choices[layer] for layer in self.mixtures], 1).to(torch.int32)
            wide = chosen_TX.shape[1]
            shapes = [(counts[rank // tp] if rank % tp == 0 else 0, wide) for rank in range(group.ranks)]
            found = group.world.to_first(chosen_TX if first else chosen_TX[:0], shapes, "routes")
            if found:
                all_TX = torch.cat(found).long()
                parts = all_TX.split([routing.choices[layer].shape[1] for layer in self.mixtures], 1)
                routing.choices.update(zip(self.mixtures, parts, strict=True))
        asked = [sum(len(p.tokens) for p in pieces if p.dp == dp and p.hidden) for dp in range(group.layout.dp)]
        keep_T = torch.tensor([piece.hidden for piece in own for _ in piece.tokens], dtype=torch.bool)
        shapes = [
            (asked[rank // tp] if rank % tp == 0 and rank else 0, hidden_TD.shape[1]) for rank in range(group.ranks)
        ]
        sent_ND = hidden_TD[keep_T.to(hidden_TD.device)] if first and group.rank else hidden_TD[:0]
        found = group.world.to_first(sent_ND, shapes, "hidden")
        if not found:
            return hidden_TD, routing
        all_TD = hidden_TD.new_zeros(sum(counts), hidden_TD.shape[1])
        all_TD[: len(hidden_TD)] = hidden_TD
        others = [piece for piece in pieces if piece.dp]
        far_T = torch.tensor([piece.hidden for piece in others for _ in piece.tokens], dtype=torch.bool)
        all_TD[len(hidden_TD) :][far_T.to(all_TD.device)] = torch.cat(found[1:])
        return all_TD, routing
