"""Mixed precision in a budget: bits where the loss is sensitive (Quantization in Layer's Input is Matter; LLC; HAGO).

    moesaic compress out/smollm2 --method mixed --out out/small bits=4
    moesaic compress out/smollm2 --method mixed --out out/small bits=4.5 target=transformers

What rounding a matrix costs is predicted from one backward pass (`compress/sensitivity.py`): what its error does to
what flows on, times how sensitive the loss is to that. A choice of bits for each matrix with the least predicted cost
within the budget is a knapsack with groups, which HiGHS solves exactly. The budget is the bytes of `bits` for all
matrices and `--ends-bits` for the embedding and the output matrix, which get their bits in the same way. Choices are
what the target can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import damped, gptq
from moesaic.compress.grid import Grid
from moesaic.compress.layer_store import Part
from moesaic.compress.layerwise import ENDS_GROUP, LayerwiseCompressor, MatrixCompressor, ends
from moesaic.compress.refine import refined, weights_of
from moesaic.compress.sensitivity import OutputSensitivity, Sensitivities
from moesaic.errors import UserError
from moesaic.kernels.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from moesaic.compress.job import Job

# What can be run: our own kernels, or what `transformers` reads.
TARGETS = {"moesaic": (2, 3, 4, 5, 6, 8), "transformers": (4, 8)}
TRIED_ON, TRIED_ON_ENDS = 64, 2048  # outputs of a part; tokens of the vocabulary, some of which are much rarer
DAMPING = 0.1


@dataclass(frozen=True)
class Mixed(LayerwiseCompressor):
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

    @property
    def not_joined(self) -> str:
        return "codes of several sizes"  # loaded without an error, with wrong outputs

    def _grid(self, bits: int, whole_zeros: bool = False) -> Grid:
        return Grid(bits, self.group, self.symmetric, whole_zeros=whole_zeros)

    def _plan(self, job: Job) -> dict[str, int]:
        if not job.store.has("plan"):
            job.store.put("plan", Part(facts={"bits": self._planned(job)}))
        plan: dict[str, int] = job.store.about("plan")["facts"]["bits"]
        return plan

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        plan = self._plan(job)

        def make(name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
            grid = self._grid(plan.get(name, 8), job.whole_zeros)
            if self.rounding == "gptq":
                return gptq(weight_OI, statistics, grid)
            return grid.matrix(weight_OI, importance_I=statistics.importance_I)

        return make

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        raise AssertionError("bits are chosen for the whole model first")

    def end_bits(self, job: Job, name: str) -> int:
        return self._plan(job).get(name, job.ends_bits)

    def _planned(self, job: Job) -> dict[str, int]:
        choices = TARGETS[self.target]
        sensitivities = Sensitivities(job)
        costs: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        budget = 0.0
        for name, weight_OI, parts in sensitivities.matrices():
            costs[name] = [self._cost(weight_OI, parts, bits) for bits in choices]
            sizes[name] = weight_OI.numel()
            budget += self.bits * weight_OI.numel()
        for name in ends(job.config) if job.ends_bits else ():
            whole_VD = job.tensor(name)
            costs[name] = [self._end_cost(name, whole_VD, sensitivities, bits) for bits in choices]
            sizes[name] = whole_VD.numel()
            budget += job.ends_bits * whole_VD.numel()
        bits_of = np.array([[bits * size for bits in choices] for size in sizes.values()], dtype=float)
        chosen = knapsack(np.array(list(costs.values())), bits_of, budget)
        return {name: choices[choice] for name, choice in zip(costs, chosen, strict=True)}

    def _cost(self, weight_OI: Tensor, parts: list[OutputSensitivity], bits: int) -> float:
        if not parts:  # an expert that no token came to: no fewer bits than the average
            return 0.0 if bits >= self.bits else 1.0
        return sum(
            part.cost(*self._tried(weight_OI[part.rows], part, self._grid(bits), self.rounding == "gptq", TRIED_ON))
            for part in parts
        )

    def _end_cost(self, name: str, whole_VD: Tensor, sensitivities: Sensitivities, bits: int) -> float:
        grid, parts = Grid(bits, ENDS_GROUP), sensitivities.end(name)
        if not parts:
            return sensitivities.looked_up(grid.rounded(whole_VD) - whole_VD)
        (part,) = parts
        change_VD, some = self._tried(whole_VD, part, grid, True, TRIED_ON_ENDS)
        return part.cost(change_VD, some) + (sensitivities.looked_up(change_VD, some) if name == "embed" else 0.0)

    def _tried(
        self, weight_OI: Tensor, part: OutputSensitivity, grid: Grid, refine: bool, most: int
    ) -> tuple[Tensor, slice]:
        """Some outputs are rounded as all will be in the end, or nearly so: how they change, and which they are."""
        some = slice(0, len(weight_OI), max(1, len(weight_OI) // most))
        some_OI = weight_OI[some]
        moments_II = damped(part.moments_II, DAMPING)
        steps = grid.fit(some_OI, moments_II.diagonal())
        codes_OI = grid.codes(some_OI, *steps)
        if refine:
            codes_OI, steps = refined(some_OI, moments_II, grid, codes_OI, steps, 1)
        return weights_of(grid, codes_OI, steps) - some_OI, some


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
