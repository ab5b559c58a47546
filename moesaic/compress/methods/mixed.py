"""Mixed precision in a budget: bits where the loss feels them (Quantization in Layer's Input is Matter; LLC; HAGO).

    moesaic compress out/smollm2 --method mixed --out out/small bits=3.0
    moesaic compress out/smollm2 --method mixed --out out/small bits=4.5 target=transformers

What rounding a matrix costs is predicted from one backward pass: to first order the inner product of the loss's
gradient with the change, and to second order the change at the output times the gradients there (noise in a layer's
input is what the next layers feel). A choice of bits for each matrix with the least predicted cost within the budget is
a knapsack with groups, which HiGHS solves exactly. Choices are what the target can run, clipped where that rounds best.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic import kernels
from moesaic.compress.grid import Grid
from moesaic.compress.layers import matrices_of
from moesaic.compress.methods import ByMatrix, Maker
from moesaic.compress.methods.gptq import gptq
from moesaic.compress.seen import Seen
from moesaic.compress.shelf import Part
from moesaic.errors import UserError
from moesaic.kernels.quantised import QuantisedMatrix
from moesaic.model.layout import Layout

if TYPE_CHECKING:
    from moesaic.compress.job import Job

# What can be run: our own kernels, or what `transformers` reads.
TARGETS = {"moesaic": (2, 3, 4, 5, 6, 8), "transformers": (4, 8)}
FEELING_TOKENS = 2048  # read for the gradients


@dataclass(frozen=True)
class Mixed(ByMatrix):
    bits: float = 4.0  # on average over the matrices, scales not counted
    group: int = 64
    symmetric: bool = False
    target: Literal["moesaic", "transformers"] = "moesaic"
    rounding: Literal["gptq", "rtn"] = "gptq"

    def __post_init__(self) -> None:
        choices = TARGETS[self.target]
        Grid(choices[0], self.group)
        if not choices[0] <= self.bits <= choices[-1]:
            raise ValueError(f"bits must be from {choices[0]} to {choices[-1]}, not {self.bits}")

    def _grid(self, bits: int) -> Grid:
        return Grid(bits, self.group, self.symmetric)

    def maker(self, job: Job) -> Maker:
        if not job.shelf.has("plan"):
            job.shelf.put("plan", Part(facts={"bits": self._plan(job)}))
        plan: dict[str, int] = job.shelf.about("plan")["facts"]["bits"]

        def make(name: str, weight_OI: Tensor, seen: Seen) -> QuantisedMatrix:
            grid = replace(self._grid(plan.get(name, 8)), whole_zeros=job.whole_zeros)
            if self.rounding == "gptq":
                return gptq(weight_OI, seen, grid)
            return grid.matrix(weight_OI, importance_I=seen.importance_I)

        return make

    def matrix(self, name: str, weight_OI: Tensor, seen: Seen) -> QuantisedMatrix:
        raise AssertionError("bits are chosen for the whole model first")

    def _plan(self, job: Job) -> dict[str, int]:
        choices = TARGETS[self.target]
        costs, sizes = [], []
        names = []
        for name, weight_OI, felt in _felt(job):
            row = []
            for bits in choices:
                change_OI = self._grid(bits).rounded(weight_OI, felt.inputs_II.diagonal()) - weight_OI
                first = abs(float((felt.gradient_OI * change_OI).sum()))
                second = 0.5 * float((change_OI @ felt.inputs_II * change_OI).sum(1) @ felt.outputs_O)
                row.append(first + second)
            names.append(name)
            costs.append(row)
            sizes.append([bits * weight_OI.numel() for bits in choices])
        budget = self.bits * sum(row[0] for row in sizes) / choices[0]
        chosen = knapsack(np.array(costs), np.array(sizes, dtype=float), budget)
        return {name: choices[choice] for name, choice in zip(names, chosen, strict=True)}


def knapsack(costs: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], budget: float) -> list[int]:
    """One choice per row with the least total cost and at most `budget` of size."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows, count = costs.shape
    one_each = np.kron(np.eye(rows), np.ones(count))
    found = milp(
        (costs / max(costs.max(), 1e-30)).ravel(),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes.ravel() / budget, -np.inf, 1 + 1e-9)],
        integrality=np.ones(rows * count),
        bounds=Bounds(0, 1),
        options={"time_limit": 60, "mip_rel_gap": 1e-4},
    )
    if found.x is None:
        raise UserError("bits", "the budget is too small for any choice", "Allow more.")
    return [int(choice) for choice in found.x.reshape(rows, count).argmax(1)]


@dataclass
class _Felt:
    """What the loss feels at one matrix: its gradient, and second moments of inputs and of gradients at the output."""

    gradient_OI: Tensor
    inputs_II: Tensor
    outputs_O: Tensor


class _FeelingKernels:
    """Kernels that keep what flows into each plain matrix, and the gradients that come back to it."""

    library = None

    def __init__(self, plain: kernels.Kernels) -> None:
        self._plain = plain
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))
        self.tokens: dict[int, int] = defaultdict(int)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        y_TO = self._plain.linear(x_TI, weight_OI, bias_O)
        self.keep(id(weight_OI), x_TI, y_TO)
        return y_TO

    def keep(self, key: Any, x_TI: Tensor, y_TO: Tensor) -> None:
        rows = x_TI.detach()
        self.inputs[key] = self.inputs.get(key, torch.zeros(())) + rows.T @ rows
        self.tokens[key] += len(rows)

        def back(gradient_TO: Tensor) -> None:
            self.outputs[key] = self.outputs[key] + gradient_TO.square().sum(0)

        y_TO.register_hook(back)

    def experts(
        self,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
        activation: str,
    ) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for expert in range(len(gate_up_EGD)):
            rows, choices = (routes_TK == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            x_AD = x_TD[rows]
            both_AG = F.linear(x_AD, gate_up_EGD[expert])
            self.keep((id(gate_up_EGD), expert), x_AD, both_AG)
            hidden_AF = self._plain.gated(both_AG, activation)
            y_AD = F.linear(hidden_AF, down_EDF[expert])
            self.keep((id(down_EDF), expert), hidden_AF, y_AD)
            out_TD = out_TD.index_add(0, rows, y_AD * weights_TK[rows, choices][:, None])
        return out_TD

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _felt(job: Job) -> list[tuple[str, Tensor, _Felt]]:
    """One backward pass over the float model: the one place here that holds all of it, and its gradients."""
    from moesaic.model.directory import load

    model = load(job.source, dtype=torch.float32, device="cpu", threads=torch.get_num_threads())
    ops = _FeelingKernels(kernels.choose("cpu"))
    length = max(map(len, job.sequences))
    pieces = job.sequences[: max(1, FEELING_TOKENS // length)]
    for tokens in pieces:
        tokens_T = torch.tensor(tokens)
        hidden_TD = model(tokens_T, Layout([len(tokens)]), ops=cast(kernels.Kernels, ops))
        F.cross_entropy(model.logits_at(hidden_TD[:-1]), tokens_T[1:]).backward()
    found = []
    for number, block in enumerate(model.layers):
        parameters = dict(block.named_parameters())
        for name, weight_OI in matrices_of(block):
            stem, _, leaf = name.rpartition(".")
            expert = int(leaf) if leaf.isdigit() else None
            parameter = parameters[name if expert is None else stem]
            key: Any = id(parameter) if expert is None else (id(parameter), expert)
            inputs = weight_OI.shape[1]
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            seen = ops.tokens[key] or 1
            moments_II = ops.inputs[key] / seen if key in ops.inputs else torch.eye(inputs) * 1e-12
            # The loss is a mean over the tokens of a piece, so each token's own gradient is that many times larger.
            outputs_O = ops.outputs[key].expand(weight_OI.shape[0]) * (length / len(pieces))
            gradient = (gradient if expert is None else gradient[expert]) / len(pieces)
            felt = _Felt(gradient, moments_II, outputs_O)
            found.append((f"layers.{number}.{name}", weight_OI.detach(), felt))
    return found
