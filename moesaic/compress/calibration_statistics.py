"""Calibration statistics: the inputs of each matrix of a layer while the calibration text is read.

Tokens choose their experts, so some experts see few of them. An expert that was sent fewer than `min_tokens` also gets
the tokens that came nearest to being sent to it, for its statistics alone: what the layer computes is untouched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.block import Block
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.linear import Linear

TOKENS_AT_ONCE = 2048


class InputStatistics:
    """The rows that flowed into a matrix (T, I), and what follows from them. `share` is their share of all tokens;
    `saliency` is how much an error at each row counts, for each part of the outputs: (outputs, T) pairs, one after the
    other, with means of one."""

    def __init__(self, rows_TI: Tensor, share: float = 1.0, saliency: Sequence[tuple[int, Tensor]] = ()) -> None:
        self.rows_TI, self.share, self.saliency = rows_TI, share, tuple(saliency)

    @cached_property
    def moments_II(self) -> Tensor:
        """The mean outer product: an error e of a row of weights costs e @ moments @ e at the output."""
        every = [counts_T for _, counts_T in self.saliency]
        return self._moments(torch.stack(every).mean(0) if every else None)

    def parts(self, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """The moments for each part of the outputs."""
        if len(self.saliency) < 2:
            yield slice(0, outputs), self.moments_II
            return
        start = 0
        for size, counts_T in self.saliency:
            yield slice(start, start + size), self._moments(counts_T)
            start += size

    def split(self) -> tuple[InputStatistics, InputStatistics]:
        """Most of the tokens, and the rest, which come from other pieces of the text."""
        most = len(self.rows_TI) * 3 // 4
        first = InputStatistics(
            self.rows_TI[:most], self.share, [(size, counts_T[:most]) for size, counts_T in self.saliency]
        )
        return first, InputStatistics(
            self.rows_TI[most:], self.share, [(size, counts_T[most:]) for size, counts_T in self.saliency]
        )

    def _moments(self, counts_T: Tensor | None) -> Tensor:
        inputs = self.rows_TI.shape[1]
        total_II = self.rows_TI.new_zeros(inputs, inputs)
        for start in range(0, len(self.rows_TI), TOKENS_AT_ONCE):
            rows = self.rows_TI[start : start + TOKENS_AT_ONCE]
            if counts_T is not None:
                rows = rows * counts_T[start : start + TOKENS_AT_ONCE, None].sqrt()
            total_II.addmm_(rows.T, rows)
        return total_II / max(len(self.rows_TI), 1)

    @property
    def importance_I(self) -> Tensor:
        return self.moments_II.diagonal()

    @property
    def size_I(self) -> Tensor:
        return self.rows_TI.abs().mean(0)

    def error(self, weight_OI: Tensor, other_OI: Tensor) -> float:
        """The squared error at the output as a share of the output's own size."""
        off_OI = other_OI - weight_OI
        size = (weight_OI @ self.moments_II * weight_OI).sum()
        return float((off_OI @ self.moments_II * off_OI).sum() / size.clamp(min=1e-20))


def uniform_statistics(weight_OI: Tensor) -> InputStatistics:
    """For matrices that no text is read through: every input as important as any other."""
    inputs = weight_OI.shape[1]
    statistics = InputStatistics(weight_OI.new_zeros(0, inputs))
    statistics.moments_II = torch.eye(inputs, device=weight_OI.device)
    return statistics


class RecordingKernels(WrappedKernels):
    """Kernels that record what flows into every matrix, by its call site."""

    def __init__(self, plain: Kernels) -> None:
        super().__init__(plain)
        self.rows: dict[str, list[Tensor]] = defaultdict(list)
        self.routed: dict[str, list[tuple[Tensor, Routes]]] = defaultdict(list)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        self.rows[site].append(x_TI)
        return self.plain.linear(x_TI, weight_OI, bias_O, site)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        self.routed[weights.site].append((x_TD, routes))
        return self.plain.experts(x_TD, routes, weights)


# Runs a layer again on what flows into it, piece by piece: (kernels) -> (rows of it, what comes out) ...
Run = Callable[[Kernels], Iterator[tuple[slice, Callable[[Block], Tensor]]]]


class CalibratedLayer:
    """A layer's statistics, by the name of the parameter in it (`attention.qkv.weight`, `ffn.down_EDF.3`)."""

    def __init__(self, block: Block, kernels: RecordingKernels, min_tokens: int, run: Run, out_TD: Tensor) -> None:
        self._block, self._kernels, self._min_tokens = block, kernels, min_tokens
        self.run, self.out_TD, self.plain = run, out_TD, kernels.plain
        # By the matrix's site: how much an error at each token counts, for each part of its outputs.
        self.saliency: dict[str, list[tuple[int, Tensor]]] = {}

    def statistics(self, name: str) -> InputStatistics | None:
        path, _, leaf = name.rpartition(".")
        if leaf.isdigit():
            return self._expert(path, int(leaf))
        site = cast(Linear, self._block.get_submodule(path)).site
        rows = self._kernels.rows.get(site)
        return InputStatistics(torch.cat(rows), 1.0, self.saliency.get(site, ())) if rows else None

    def calls(self) -> list[tuple[Tensor, Routes]]:
        """What flowed into the mixture, where it went, and with which weights."""
        assert isinstance(self._block.ffn, MixtureFeedForward)
        return self._kernels.routed[self._block.ffn.site]

    def all_inputs(self) -> InputStatistics | None:
        """What flowed into the mixture, whichever experts it went to."""
        calls = self.calls()
        return InputStatistics(torch.cat([x for x, _ in calls])) if calls else None

    def _expert(self, name: str, expert: int) -> InputStatistics | None:
        ffn = self._block.ffn
        assert isinstance(ffn, MixtureFeedForward)
        calls = self.calls()
        if not calls:
            return None
        x_TD = torch.cat([x for x, _ in calls])
        chosen_T = torch.cat([(routes.experts_TK == expert).any(1) for _, routes in calls])
        share = float(chosen_T.float().mean())
        rows = chosen_T.nonzero().squeeze(1)
        if len(rows) < min(self._min_tokens, len(x_TD)):
            scores_T = F.linear(x_TD, ffn.router.weight[expert][None]).squeeze(1).masked_fill(chosen_T, float("inf"))
            rows = scores_T.topk(min(self._min_tokens, len(x_TD))).indices
        x_AD = x_TD[rows]
        if name.endswith("gate_up_EGD"):
            return InputStatistics(x_AD, share)
        bias_G = None if ffn.bias_EG is None else ffn.bias_EG[expert]
        both_AG = F.linear(x_AD, ffn.gate_up_EGD[expert], bias_G)
        return InputStatistics(self._kernels.gated(both_AG, ffn.activation), share)
