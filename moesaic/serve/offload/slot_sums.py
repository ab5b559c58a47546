"""Experts that lie in slots, in whatever order, summed to the bits they have when all lie in a row.

What an expert makes of a row depends on nothing but the two; what could differ is the order in which a token's experts
are added, which by the kernels is that of the experts' numbers or that of the token's choices. Where it is that of the
choices (Triton, or few rows by the library), or where the slots happen to lie in the order of the experts, kernels can
be given slots for experts. Elsewhere, and where the slots hold only some of a batch's experts at a time, each
assignment's row is computed by itself, wave by wave, and rows are added afterwards in the kernels' own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from moesaic.kernels import cpu, reference
from moesaic.kernels.interface import Dispatched, Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights

REFERENCE = cast(Kernels, reference)


def sums_by_choice(plain: Kernels, x_TD: Tensor, activation: str) -> bool:
    """Whether the plain kernels add a token's experts in the order of its choices."""
    if plain is REFERENCE:
        return False
    if x_TD.is_cuda:
        return activation == "silu"
    return len(x_TD) <= cpu.FEW_ROWS and not _in_native_code(plain, x_TD, activation)


def in_order(slots: Sequence[int]) -> bool:
    """Whether the slots of experts, which are given in order, are in order too."""
    return all(one < other for one, other in pairwise(slots))


def _in_native_code(plain: Kernels, x_TD: Tensor, activation: str) -> bool:
    native = getattr(plain, "library", None) is not None and x_TD.is_cpu and x_TD.dtype == torch.float32
    return native and activation == "silu"


class Waves(Protocol):
    def compute(self, experts: Sequence[int], slot_of_E: Tensor, slots: ExpertWeights) -> None:
        """The rows of these experts, which lie in slots now."""

    def sum(self) -> Tensor:
        """Once all have been computed."""


def waves(plain: Kernels, x_TD: Tensor, routes: Routes, count: int, activation: str) -> Waves:
    """To go through a batch some experts at a time."""
    if x_TD.is_cuda and plain is not REFERENCE and activation == "silu":
        return ChoiceWaves(plain, x_TD, routes)
    if _in_native_code(plain, x_TD, activation):
        return ExpertWaves(plain, x_TD, routes)
    if len(x_TD) <= cpu.FEW_ROWS and plain is not REFERENCE:
        return TokenWaves(plain, x_TD, routes)
    return GroupedWaves(plain, x_TD, routes, count)


class RowWaves:
    """Each assignment's row, in the order of tokens and their choices."""

    def __init__(self, plain: Kernels, x_TD: Tensor, routes: Routes) -> None:
        self.plain, self.x_TD, self.routes = plain, x_TD, routes
        self.rows_AD = x_TD.new_empty(routes.experts_TK.numel(), x_TD.shape[1])

    def compute(self, experts: Sequence[int], slot_of_E: Tensor, slots: ExpertWeights) -> None:
        experts_A, choices = self.routes.experts_TK.reshape(-1), self.routes.experts_TK.shape[1]
        chosen_A = torch.isin(experts_A, torch.tensor(experts, device=experts_A.device)).nonzero().squeeze(1)
        x_AD, slots_A = self.x_TD[chosen_A // choices], slot_of_E[experts_A[chosen_A]]
        self.rows_AD[chosen_A] = self.rows(x_AD, slots_A, chosen_A, slots)

    def rows(self, x_AD: Tensor, slots_A: Tensor, chosen_A: Tensor, slots: ExpertWeights) -> Tensor:
        raise NotImplementedError


class ExpertWaves(RowWaves):
    """The native kernel, of one choice per row: it folds routing weights into the hidden rows, and adds a token's
    experts in the order of their numbers, beginning with zero."""

    def rows(self, x_AD: Tensor, slots_A: Tensor, chosen_A: Tensor, slots: ExpertWeights) -> Tensor:
        weights_A = self.routes.weights_TK.reshape(-1)[chosen_A]
        return self.plain.experts(x_AD, Routes(slots_A.unsqueeze(1), weights_A.unsqueeze(1)), slots)

    def sum(self) -> Tensor:
        tokens, choices = self.routes.experts_TK.shape
        rows_TKD = self.rows_AD.view(tokens, choices, -1)
        order_KT = self.routes.experts_TK.argsort(1).T
        token_T = torch.arange(tokens, device=order_KT.device)
        out_TD = torch.zeros_like(self.x_TD)
        for choice_T in order_KT:
            out_TD += rows_TKD[token_T, choice_T]
        return out_TD


class ChoiceWaves(RowWaves):
    """Triton's kernels: they weigh rounded rows, and add them in float32 in the order of the choices."""

    def rows(self, x_AD: Tensor, slots_A: Tensor, chosen_A: Tensor, slots: ExpertWeights) -> Tensor:
        from moesaic.kernels.triton.experts.layer import assignment_rows  # Triton, which is on machines with a GPU

        return assignment_rows(x_AD, slots_A, slots.gate_up_EGD, slots.down_EDF)

    def sum(self) -> Tensor:
        from moesaic.kernels.triton.experts.rows import combine_tokens

        return combine_tokens(self.rows_AD, self.routes.weights_TK.contiguous())


class GroupedWaves:
    """The library's grouped matmul over rows sorted by expert: of an expert always all rows together, since the bits of
    a matmul may depend on how many they are. Then they are combined as always."""

    def __init__(self, plain: Kernels, x_TD: Tensor, routes: Routes, count: int) -> None:
        self.plain = plain
        self.sent = plain.dispatch(x_TD, routes, count)
        self.experts_A = routes.experts_TK.reshape(-1).sort(stable=True).values
        self.rows_AD = torch.empty_like(self.sent.x_AD)

    def compute(self, experts: Sequence[int], slot_of_E: Tensor, slots: ExpertWeights) -> None:
        sent = self.sent
        wanted = torch.tensor(experts, device=self.experts_A.device)
        chosen = torch.isin(self.experts_A, wanted).nonzero().squeeze(1)
        slots_A = slot_of_E[self.experts_A[chosen]]
        order_A = slots_A.argsort(stable=True)
        chosen = chosen[order_A]
        counts_S = torch.bincount(slots_A, minlength=len(slots.gate_up_EGD))
        part = Dispatched(sent.x_AD[chosen], sent.weights_A1[chosen], counts_S, sent.token_A[chosen], sent.tokens)
        self.rows_AD[chosen] = self.plain.compute_experts(part, slots)

    def sum(self) -> Tensor:
        return self.plain.combine(self.rows_AD, self.sent)


class TokenWaves:
    """A few rows by the library, which rounds each sum of a token's experts: so a token's experts must be there all at
    once, and a wave is those of a token."""

    def __init__(self, plain: Kernels, x_TD: Tensor, routes: Routes) -> None:
        self.plain, self.x_TD, self.routes = plain, x_TD, routes
        self.out_TD = torch.empty_like(x_TD)

    def compute(self, experts: Sequence[int], slot_of_E: Tensor, slots: ExpertWeights) -> None:
        there = set(experts)
        for token, chosen in enumerate(self.routes.experts_TK.tolist()):
            if there.issuperset(chosen):
                row = slice(token, token + 1)
                routes = Routes(slot_of_E[self.routes.experts_TK[row]], self.routes.weights_TK[row])
                self.out_TD[row] = self.plain.experts(self.x_TD[row], routes, slots)

    def sum(self) -> Tensor:
        return self.out_TD
