"""A rank's kernels in a worker group: matmuls by this rank's output rows, and what must be known whole gathered.

They stand in for `ops` of a model that holds the rank's share (`shares.py`). Hidden states are whole on every tensor
rank; heads and hidden units are this rank's, until the matrix that reads them asks for all. Kernels that correct or
quantize stay inside: they see whole inputs and this rank's rows of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from moesaic.kernels.interface import AttentionCall, Kernels, LatentCall, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.config import ModelConfig
from moesaic.serve.group.divided_experts import divided_experts
from moesaic.serve.group.exchanged_experts import exchanged_experts
from moesaic.serve.group.placement import Placement
from moesaic.serve.group.shares import spans, widths
from moesaic.serve.group.worker_group import WorkerGroup

READS = frozenset({"out", "down"})  # what others made a part of


class GroupKernels(WrappedKernels):
    """`placements` says where a layer's experts lie, by its site."""

    def __init__(self, plain: Kernels, group: WorkerGroup, config: ModelConfig) -> None:
        super().__init__(plain)
        self.group, self.config, self.link = group, config, group.tensor
        self.placements: dict[str, Placement] = {}
        self.steps = 0  # that were run, on every rank as many
        self.output_site = "embed" if config.tied else "head"
        # Rank 0 says so to the others, outside a step, that logits of these hidden states are wanted.
        self.announce: Callable[[Tensor], None] | None = None
        self.stream = widths(config.hidden, self.link.size)

    def over(self, plain: Kernels) -> Self:
        """The same over other kernels."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, plain=plain)
        return other

    def embed(self, tokens_T: Tensor, table_VD: Tensor, site: str = "") -> Tensor:
        """Every rank looks up the tokens of its share of the vocabulary."""
        if self.link.size == 1 or not len(tokens_T):
            return self._embed(tokens_T, table_VD, site)
        ends_R = torch.tensor([stop for _, stop in spans(self.config.vocab, self.link.size)], device=tokens_T.device)
        owner_T = torch.bucketize(tokens_T, ends_R, right=True)
        mine_T = tokens_T[owner_T == self.link.index] - spans(self.config.vocab, self.link.size)[self.link.index][0]
        counts = torch.bincount(owner_T, minlength=self.link.size).tolist()
        found_TD = self.link.rows(self._embed(mine_T, table_VD, site), counts, "embed")
        return found_TD[owner_T.argsort(stable=True).argsort()]

    def _embed(self, tokens_T: Tensor, table_VD: Any, site: str) -> Tensor:
        """A quantized table has no shape for no rows."""
        some_T = tokens_T if len(tokens_T) else tokens_T.new_zeros(1)
        return self.plain.embed(some_T, table_VD, site)[: len(tokens_T)]

    def linear(self, x_TI: Tensor, weight_OI: Any, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        kind = site.rpartition(".")[2]
        if site == self.output_site:
            if self.announce is not None:
                self.announce(x_TI)
            return self.logits(x_TI, weight_OI)
        if kind in READS:
            x_TI = self.link.columns(x_TI, widths(weight_OI.shape[1], self.link.size), kind)
        y_TO = self.plain.linear(x_TI, weight_OI, bias_O, site)
        return self.link.columns(y_TO, self.stream, "stream") if kind in READS or kind == "join" else y_TO

    def logits(self, hidden_ND: Tensor, weight_VD: Any) -> Tensor:
        """Of these rows, on the group's first rank; others find nothing. All tensor ranks ask together."""
        own_NV = self.plain.linear(hidden_ND, weight_VD, None, self.output_site)
        shapes = [(len(own_NV), width) for width in widths(self.config.vocab, self.link.size)]
        found = self.link.to_first(own_NV, shapes, "logits")
        return torch.cat(found, 1) if found else own_NV[:0]

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        if not len(q_THC):
            return torch.empty_like(q_THC)
        return self.plain.attend(q_THC, k_TNC, v_TNC, call)

    def attend_latent(self, call: LatentCall) -> Tensor:
        if not len(call.q_THC):
            heads = call.q_THC.shape[1]
            return call.q_THC.new_empty(0, heads, call.up.shape[0] // heads - call.plain_size)
        return self.plain.attend_latent(call)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        layout = self.group.layout
        if layout.ep > 1:
            placement = self.placements.get(weights.site)
            if placement is None:
                here = len(weights.gate_up_EGD)
                placement = self.placements[weights.site] = Placement.even(here * layout.ep, layout.ep, x_TD.device)
            return exchanged_experts(x_TD, routes, weights, placement, self.group, self.plain)
        if layout.tp > 1:
            return divided_experts(x_TD, routes, weights, self.link, self.stream, self.plain)
        return self.plain.experts(x_TD, routes, weights)
