"""Sensitivity of the loss to every matrix: how far the next-token distribution moves when its weights are changed.

Labels are drawn from the model itself, so that the mean square of the loss's gradients is the curvature of the
divergence from it (Fisher). At a matrix y = W x, a change e of an output's weights moves y by e x and costs
0.5 g^2 (e x)^2 with the gradient g that comes back to it. Summed over tokens that is a quadratic form in e. Its moments
are shared by the outputs of a part of the matrix (queries, keys and values apart), with each output's own share.
Nearly every token reads the first one's keys and values, so tokens must count by their own gradients.

Rounding the inputs x of a matrix to 8 bits moves y by W dx, which costs 0.5 (g W dx)^2 at each token ("Quantization in
Layer's Input is Matter": that is often more than what rounding the weights costs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.compress.saliency import output_parts
from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.quantized import rounded_to_8_bits
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.block import Block
from moesaic.model.layout import Layout
from moesaic.model.matrices import matrices_of

if TYPE_CHECKING:
    from moesaic.compress.job import Job

TOKENS = 2048  # read for the gradients


@dataclass
class OutputSensitivity:
    """For a part of a matrix's outputs: a change e_OI costs sum(share_O * e @ moments @ e), in nats a token."""

    rows: slice
    moments_II: Tensor
    share_O: Tensor

    def cost(self, change_OI: Tensor, of: slice = slice(None)) -> float:
        """`of`: the change is that of some of the part's outputs only, which stand for all."""
        share_O = self.share_O[of]
        whole = self.share_O.sum() / share_O.sum().clamp(min=1e-30)
        return float(share_O @ (change_OI @ self.moments_II * change_OI).sum(1) * whole)


class SensitivityKernels(WrappedKernels):
    """Kernels that keep the moments of what flows into each plain matrix, weighed by the gradients that come back."""

    def __init__(self, plain: Kernels, parts: dict[str, list[int]]) -> None:
        super().__init__(plain)
        self._parts = parts
        self.moments: dict[str, list[Tensor]] = {}
        self.squares: dict[str, list[Tensor]] = {}
        self.input_costs: dict[str, float] = {}  # of rounding what flows in to 8 bits, summed over tokens

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        y_TO = self.plain.linear(x_TI, weight_OI, bias_O, site)
        self._keep(site, self._parts.get(site, [len(weight_OI)]), x_TI.detach(), y_TO, weight_OI.detach())
        return y_TO

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for expert in range(len(weights.gate_up_EGD)):
            rows, choices = (routes.experts_TK == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            x_AD = x_TD[rows]
            bias_G = None if weights.bias_EG is None else weights.bias_EG[expert]
            both_AG = F.linear(x_AD, weights.gate_up_EGD[expert], bias_G)
            self._keep(
                f"{weights.site}.gate_up_EGD.{expert}",
                [both_AG.shape[1]],
                x_AD.detach(),
                both_AG,
                weights.gate_up_EGD[expert],
            )
            hidden_AF = self.plain.gated(both_AG, weights.activation)
            y_AD = F.linear(hidden_AF, weights.down_EDF[expert])
            self._keep(
                f"{weights.site}.down_EDF.{expert}", [y_AD.shape[1]], hidden_AF.detach(), y_AD, weights.down_EDF[expert]
            )
            out_TD = out_TD.index_add(0, rows, y_AD * routes.weights_TK[rows, choices][:, None])
        return out_TD

    def _keep(self, key: str, sizes: list[int], x_TI: Tensor, y_TO: Tensor, weight_OI: Tensor) -> None:
        def back(gradient_TO: Tensor) -> None:
            off_TI = rounded_to_8_bits(x_TI) - x_TI
            moved_T = (gradient_TO @ weight_OI.detach() * off_TI).sum(1)
            self.input_costs[key] = self.input_costs.get(key, 0.0) + 0.5 * float(moved_T.square().sum())
            squares = gradient_TO.square().split(sizes, dim=1)
            weighed = [x_TI * part_TO.sum(1).sqrt()[:, None] for part_TO in squares]
            moments, sums = [rows.T @ rows for rows in weighed], [part_TO.sum(0) for part_TO in squares]
            if key in self.moments:
                moments = [old + new for old, new in zip(self.moments[key], moments, strict=True)]
                sums = [old + new for old, new in zip(self.squares[key], sums, strict=True)]
            self.moments[key], self.squares[key] = moments, sums

        if y_TO.requires_grad:  # an indexer chooses; nothing comes back to it
            y_TO.register_hook(back)

    def sensitivity_of(self, key: str, tokens: int) -> list[OutputSensitivity]:
        """Nothing for a matrix that no token came to."""
        found, start = [], 0
        for moments_II, squares_O in zip(self.moments.get(key, ()), self.squares.get(key, ()), strict=True):
            share_O = 0.5 / tokens * squares_O / squares_O.sum().clamp(min=1e-30)
            found.append(OutputSensitivity(slice(start, start + len(share_O)), moments_II, share_O))
            start += len(share_O)
        return found


class Sensitivities:
    """Of a whole model, which is in memory here with the gradients of its activations."""

    def __init__(self, job: Job) -> None:
        from moesaic.model.directory import load

        self.model = load(job.source, dtype=torch.float32, device=job.device, threads=torch.get_num_threads())
        self.model.requires_grad_(False)
        parts: dict[str, list[int]] = {}
        for block in self.model.layers:
            parts |= output_parts(cast(Block, block))
        self.ops = SensitivityKernels(job.kernels, parts)
        self.embedded_VD = torch.zeros_like(self.model.embed)  # squares of the gradients at what was looked up
        pieces = job.sequences[: max(1, TOKENS // max(map(len, job.sequences)))]
        self.tokens = sum(map(len, pieces))
        generator = torch.Generator(job.device).manual_seed(0)
        for number, tokens in enumerate(pieces):
            job.progress("measuring sensitivity", number, len(pieces))
            self._read(torch.tensor(tokens, device=job.device), generator, job.source)

    def _read(self, tokens_T: Tensor, generator: torch.Generator, place: Path) -> None:
        model, ops = self.model, cast(Kernels, self.ops)
        with torch.enable_grad():
            x_TD, context = model.begin(tokens_T, Layout([len(tokens_T)], device=model.device), None, ops)
            x_TD.requires_grad_()
            logits_TV = model.logits_at(model.finish(model.run_layers(x_TD, context), context), ops=ops)
            if not logits_TV.isfinite().all():
                raise UserError(place, "predicts values that are not finite", "Take weights from before that.")
            labels_T = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=generator).squeeze(1)
            F.cross_entropy(logits_TV, labels_T, reduction="sum").backward()
        assert x_TD.grad is not None
        self.embedded_VD.index_add_(0, tokens_T, x_TD.grad.square())

    def matrices(self) -> Iterator[tuple[str, Tensor, list[OutputSensitivity]]]:
        for number, block in enumerate(self.model.layers):
            for name, weight_OI in matrices_of(block):
                path = f"layers.{number}.{name}"
                yield path, weight_OI, self.ops.sensitivity_of(path.removesuffix(".weight"), self.tokens)

    def input_cost(self, name: str) -> float:
        """What rounding the inputs of a matrix to 8 bits for each token costs, in nats a token."""
        return self.ops.input_costs.get(name.removesuffix(".weight"), 0.0) / self.tokens

    def end(self, name: str) -> list[OutputSensitivity]:
        """Of the embedding or the output matrix, as far as it is multiplied by."""
        return (
            self.ops.sensitivity_of(self.model.output_site, self.tokens)
            if name == "head" or self.model.head is None
            else []
        )

    def looked_up(self, change_VD: Tensor, of: slice = slice(None)) -> float:
        """What a change of the embedding costs where its rows are looked up."""
        squares_VD = self.embedded_VD[of]
        whole = self.embedded_VD.sum() / squares_VD.sum().clamp(min=1e-30)
        return float((change_VD.square() * squares_VD).sum() * whole * 0.5 / self.tokens)
