"""N:M sparsity and bits for each matrix, searched within two budgets (NxMiFormer, Holmes et al. 2022).

    moesaic compress out/smollm2 --method nm_mixed --out out/searched bits=3 macs=0.5
    moesaic compress out/tuned --method nm_mixed --out out/small like=out/searched rounding=rtn

`bits` is what a weight may take on average, the mask of a sparse matrix counted (n/m * bits + 1); `macs` the share of
the multiplications that may be left on average. Each matrix (all experts of a layer together) is dense, 2:4 or 1:4 with
2 to 8 bits. What a choice costs is predicted from one backward pass as in `mixed`; the choices with the least predicted
cost within both budgets are a knapsack, which HiGHS solves. The plan is in the directory that is made: `moesaic train`
with `train.constraint={name: nm, like: out/searched}` tunes the original under it (ADMM with quantized weights), and
`like` packs what comes out by the same plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import damped, gptq
from moesaic.compress.layer_store import Part
from moesaic.compress.layerwise import LayerwiseCompressor, MatrixCompressor
from moesaic.compress.methods.nm import admm, quantized_kept
from moesaic.compress.sensitivity import OutputSensitivity, Sensitivities
from moesaic.errors import UserError
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.train.constraints.nm import schemes_in

if TYPE_CHECKING:
    from moesaic.compress.job import Job

FORMS = ((1, 1), (2, 4), (1, 4))  # (1, 1): dense
BITS = (2, 3, 4, 5, 6, 8)
CHOICES = [(n, m, bits) for n, m in FORMS for bits in BITS]
TRIED_ON, DAMPING, TRIED_ROUNDS = 64, 0.1, 12  # outputs of a matrix; of the moments; of the search for what stays

Choice = tuple[int, int, int]


@dataclass(frozen=True)
class NMMixed(LayerwiseCompressor):
    bits: float = 3.0  # on average, masks counted, scales not
    macs: float = 1.0  # share of multiplications, on average
    group: int = 64
    rounds: int = 24  # of the search for what stays
    rounding: Literal["gptq", "rtn"] = "gptq"
    like: str = ""  # a directory that this method made: its plan, and what is zero stays zero

    def __post_init__(self) -> None:
        Grid(4, self.group)
        if not stored_bits((1, 4, 2)) <= self.bits <= 8 or not 0.25 <= self.macs <= 1 or self.rounds < 1:
            raise ValueError("bits must be from 1.5 to 8, macs from 0.25 to 1, and rounds at least 1")

    @property
    def not_joined(self) -> str:
        return "codes of several sizes"

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        raise AssertionError("forms are chosen for the whole model first")

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        if not job.store.has("plan"):
            plan = self._read() if self.like else self._planned(job)
            job.store.put("plan", Part(facts={"plan": {name: list(choice) for name, choice in plan.items()}}))
        found: dict[str, list[int]] = job.store.about("plan")["facts"]["plan"]

        def make(name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
            n, m, bits = found.get(parameter_of(name), (1, 1, 8))  # prediction layers are not planned
            return self._made((n, m, bits), weight_OI, statistics)

        return make

    def _made(self, choice: Choice, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        n, m, bits = choice
        grid = Grid(bits, self.group)
        if m == 1:
            return gptq(weight_OI, statistics, grid) if self.rounding == "gptq" else grid.matrix(weight_OI)
        kept_OI = weight_OI != 0
        if not self.like:
            weight_OI, kept_OI = admm(weight_OI, statistics.moments_II, n, m, self.rounds)
        return quantized_kept(weight_OI, kept_OI, statistics, grid, (n, m), self.rounding)

    def _read(self) -> dict[str, Choice]:
        schemes = schemes_in(self.like).items()
        return {parameter_of(name): (scheme.n or 1, scheme.m or 1, scheme.bits) for name, scheme in schemes}

    def _planned(self, job: Job) -> dict[str, Choice]:
        costs: dict[str, Any] = defaultdict(lambda: np.zeros(len(CHOICES)))
        sizes: dict[str, int] = defaultdict(int)
        for name, weight_OI, parts in Sensitivities(job).matrices():
            costs[parameter_of(name)] += np.array([self._cost(weight_OI, parts, choice) for choice in CHOICES])
            sizes[parameter_of(name)] += weight_OI.numel()
        total = sum(sizes.values())
        budgets = [
            ([[stored_bits(choice) * size for choice in CHOICES] for size in sizes.values()], self.bits * total),
            ([[n / m * size for n, m, _ in CHOICES] for size in sizes.values()], self.macs * total),
        ]
        chosen = cheapest(np.array([costs[name] for name in sizes]), budgets)
        return {name: CHOICES[number] for name, number in zip(sizes, chosen, strict=True)}

    def _cost(self, weight_OI: Tensor, parts: list[OutputSensitivity], choice: Choice) -> float:
        """Some outputs are made as all will be in the end, or nearly so."""
        cost = 0.0
        for part in parts:
            whole_OI = weight_OI[part.rows]
            some = slice(0, len(whole_OI), max(1, len(whole_OI) // TRIED_ON))
            kept_OI, (n, m, bits) = whole_OI[some], choice
            moments_II = damped(part.moments_II, DAMPING)
            if m > 1:
                kept_OI, _ = admm(kept_OI, moments_II, n, m, TRIED_ROUNDS)
            cost += part.cost(Grid(bits, self.group).rounded(kept_OI, moments_II.diagonal()) - whole_OI[some], some)
        return cost


def stored_bits(choice: Choice) -> float:
    n, m, bits = choice
    return float(bits) if m == 1 else n / m * bits + 1


def parameter_of(name: str) -> str:
    """Experts of a layer are one parameter."""
    stem, _, leaf = name.rpartition(".")
    return stem if leaf.isdigit() else name


def cheapest(costs: np.ndarray[Any, Any], budgets: list[tuple[Any, float]]) -> list[int]:
    """One choice per row with the least total cost, within every budget: (what each choice takes, how much in all)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows, count = costs.shape
    limits = [LinearConstraint(np.array(takes).ravel() / most, -np.inf, 1 + 1e-9) for takes, most in budgets]
    found = milp(
        (costs / max(costs.max(), 1e-30)).ravel(),
        constraints=[LinearConstraint(np.kron(np.eye(rows), np.ones(count)), 1, 1), *limits],
        integrality=np.ones(rows * count),
        bounds=Bounds(0, 1),
        options={"time_limit": 60, "mip_rel_gap": 1e-4},
    )
    if found.x is None:
        raise UserError("bits", "the budgets are too small for any choice", "Allow more bits, or more macs.")
    return [int(choice) for choice in found.x.reshape(rows, count).argmax(1)]
