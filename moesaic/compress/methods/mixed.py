"""Mixed precision in a budget, for a target (Quantization in Layer's Input is Matter; LLC; HAGO).

    moesaic compress out/smollm2 --method mixed --out out/small bits=4
    moesaic compress out/smollm2 --method mixed --out out/small bits=4.5 target=transformers
    moesaic compress out/smollm2 --target avx512_vnni --out out/small bits=6 speed=2

What a matrix may become is what the target multiplies by (`compress/target.py`): weights of some bits, inputs of 16 or
8, with or without a correction of low rank. What each choice costs is predicted; the choices with the least cost
within the bytes of `bits` for all matrices (and `--ends-bits` for the embedding and the output matrix, which get their
bits in the same way) and at least `speed` times float32's are a knapsack, which is solved exactly.

`order=second` predicts by curvature (`compress/sensitivity.py`): what an error does to what flows on, times how
sensitive the loss is to that. `order=first` is LLC's: the gradient of the loss on the calibration text times the error
(`compress/first_order.py`), where that dominates; a choice whose curvature is larger than that lies outside of the
neighbourhood and costs the curvature too. It needs the very errors that will be made, so it goes with `rounding=rtn`.

Thresholds are a step of their own: the largest weights of a group are clipped where that rounds the others so much
better that the output gains. What it gained is reported beside the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.first_order import FirstOrder, holds_to
from moesaic.compress.gptq_rounding import damped, gptq
from moesaic.compress.layer_store import Part
from moesaic.compress.layerwise import ENDS_GROUP, LayerwiseCompressor, MatrixCompressor, ends
from moesaic.compress.methods.milo import MiLo, low_rank_shares
from moesaic.compress.plan_search import Budget, Option, choose
from moesaic.compress.refine import refined, weights_of
from moesaic.compress.sensitivity import OutputSensitivity, Sensitivities
from moesaic.compress.target import Multiply, read_target
from moesaic.kernels.grid import SPANS, Grid
from moesaic.kernels.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from moesaic.compress.job import Job

TRIED_ON, TRIED_ON_ENDS = 64, 2048  # outputs of a part; tokens of the vocabulary, some of which are much rarer
DAMPING = 0.1
CORRECTION_BITS = 4


@dataclass(frozen=True)
class Mixed(LayerwiseCompressor):
    bits: float = 4.0  # on average over the matrices, scales not counted
    group: int = 64
    symmetric: bool = False
    target: str = "moesaic"
    speed: float = 0.0  # times float32's, by the target's rates; 0: whatever it is
    order: Literal["first", "second"] = "second"
    rounding: Literal["gptq", "rtn"] = "gptq"
    thresholds: bool = True

    def __post_init__(self) -> None:
        target = read_target(self.target)
        object.__setattr__(self, "_target", target)
        Grid(target.fewest, self._group)
        if not target.fewest <= self.bits <= target.most:
            raise ValueError(f"bits must be from {target.fewest} to {target.most}, not {self.bits}")
        fastest = max(way.rate for way in target.multiply)
        if not 0 <= self.speed <= fastest:
            raise ValueError(f"speed must be at most {fastest}, the target's fastest rate, not {self.speed}")
        if self.order == "first" and self.rounding != "rtn":
            raise ValueError("order=first predicts by the very errors that are made, so it needs rounding=rtn")

    @property
    def _ways(self) -> tuple[Multiply, ...]:
        ways: tuple[Multiply, ...] = self._target.multiply  # type: ignore[attr-defined]
        return ways

    @property
    def _group(self) -> int:
        group: int | None = self._target.group  # type: ignore[attr-defined]
        return self.group if group is None else group

    @property
    def not_joined(self) -> str:
        return "codes of several sizes"  # loaded without an error, with wrong outputs

    @property
    def layouts(self) -> tuple[str, ...]:
        return ("moesaic",) if any(way.rank for way in self._ways) else super().layouts

    def _grid(self, way: Multiply, whole_zeros: bool = False) -> Grid:
        symmetric = self.symmetric or bool(self._target.symmetric)  # type: ignore[attr-defined]
        spans = SPANS if self.thresholds else 1
        return Grid(way.weights, self._group, symmetric, way.inputs, whole_zeros, spans)

    def _plan(self, job: Job) -> dict[str, Multiply]:
        if not job.store.has("plan"):
            job.store.put("plan", Part(facts=Planning(self, job).facts()))
        plan: dict[str, int] = job.store.about("plan")["facts"]["choices"]
        return {name: self._ways[choice] for name, choice in plan.items()}

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        plan = self._plan(job)
        widest = max((way for way in self._ways if not way.rank), key=lambda way: way.weights, default=self._ways[-1])

        def make(name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
            way = plan.get(name, widest)
            grid = self._grid(way, job.whole_zeros)
            if way.rank:
                corrected = MiLo(way.weights, self._group, way.rank, symmetric=grid.symmetric)
                return corrected.matrix(name, weight_OI, statistics)
            if self.rounding == "gptq":
                return gptq(weight_OI, statistics, grid)
            # By first order, as it was planned; else by what flows in.
            return grid.matrix(weight_OI, None, None if self.order == "first" else statistics.importance_I)

        return make

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        raise AssertionError("bits are chosen for the whole model first")

    def end_bits(self, job: Job, name: str) -> int:
        plan = self._plan(job)
        return plan[name].weights if name in plan else job.ends_bits


@dataclass
class Planning:
    """Costs of all choices for a model, and the plan that follows from them."""

    method: Mixed
    job: Job
    options: dict[str, list[Option]] = field(default_factory=dict)
    errors: dict[str, list[Tensor]] = field(default_factory=dict)  # by first order: of each choice
    curvatures: dict[str, list[float]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        method, job = self.method, self.job
        sensitivities = Sensitivities(job)
        budget = Budget()
        matrices = list(sensitivities.matrices())
        first = None
        if method.order == "first":
            first = FirstOrder(sensitivities.model, [name for name, _, parts in matrices if parts], job.sequences)
        gains = []
        for name, weight_OI, parts in matrices:
            size = weight_OI.numel()
            costs = [self.cost(name, weight_OI, parts, way, sensitivities, first) for way in method._ways]
            self.options[name] = [
                Option(cost, way.weights * size + way.rank * CORRECTION_BITS * sum(weight_OI.shape), size / way.rate)
                for cost, way in zip(costs, method._ways, strict=True)
            ]
            budget.bits += method.bits * size
            if parts:
                gains.append(self.threshold_gain(weight_OI, parts[0]))
        if method.speed:
            budget.time = sum(weight_OI.numel() for _, weight_OI, _ in matrices) / method.speed
        plain = [number for number, way in enumerate(method._ways) if way.inputs == 16 and not way.rank]
        for name in ends(job.config) if job.ends_bits and plain else ():
            whole_VD = job.tensor(name)
            self.options[name] = [
                Option(self.end_cost(name, whole_VD, sensitivities, way.weights), way.weights * whole_VD.numel())
                for way in (method._ways[number] for number in plain)
            ]
            budget.bits += job.ends_bits * whole_VD.numel()
        found = choose(self.options, budget)
        choices = {name: plain[n] if name in ("embed", "head") else n for name, n in found.items()}
        facts: dict[str, Any] = {
            "choices": choices,
            "predicted_cost": sum(self.options[name][choice].cost for name, choice in found.items()),
            "threshold_gain": round(sum(gains) / max(len(gains), 1), 4),
        }
        time = sum(self.options[name][choice].time for name, choice in found.items() if name not in ("embed", "head"))
        facts["predicted_speed"] = round(sum(weight.numel() for _, weight, _ in matrices) / time, 3)
        if first is not None:
            facts["neighbourhood"] = self.neighbourhood(first, found)
        return facts

    def cost(
        self,
        name: str,
        weight_OI: Tensor,
        parts: list[OutputSensitivity],
        way: Multiply,
        sensitivities: Sensitivities,
        first: FirstOrder | None,
    ) -> float:
        """Of a matrix kept in one way, in nats a token."""
        if not parts:  # an expert that no token came to: no fewer bits than the average
            return 0.0 if way.weights >= self.method.bits else 1.0
        of_inputs = sensitivities.input_cost(name) if way.inputs == 8 else 0.0
        grid, refine = self.method._grid(way), self.method.rounding == "gptq"
        if first is None:
            of_weights = sum(part.cost(*tried(weight_OI[part.rows], part, grid, refine, TRIED_ON)) for part in parts)
            return of_weights * self.left_by_rank(weight_OI, parts, grid, way.rank) + of_inputs
        error_OI = grid.rounded(weight_OI) - weight_OI
        curvature = sum(part.cost(error_OI[part.rows]) for part in parts)
        change = first.change(name, error_OI)
        self.errors.setdefault(name, []).append(error_OI)
        self.curvatures.setdefault(name, []).append(curvature)
        return change + (curvature if curvature > abs(change) else 0.0) + of_inputs

    def left_by_rank(self, weight_OI: Tensor, parts: list[OutputSensitivity], grid: Grid, rank: int) -> float:
        """The share of the cost that a correction of low rank leaves."""
        if not rank:
            return 1.0
        moments_II = damped(torch.stack([part.moments_II for part in parts]).sum(0), DAMPING)
        return low_rank_shares(grid.rounded(weight_OI) - weight_OI, moments_II, rank)

    def threshold_gain(self, weight_OI: Tensor, part: OutputSensitivity) -> float:
        """The share of the cost that clipping saves, with the fewest bits that may be chosen."""
        way = min(self.method._ways, key=lambda way: way.weights)
        some = slice(part.rows.start, part.rows.stop, max(1, (part.rows.stop - part.rows.start) // TRIED_ON))
        weight_OI, costs = weight_OI[some], []
        for spans in (1, SPANS):
            grid = Grid(way.weights, self.method._group, self.method.symmetric, spans=spans)
            off_OI = grid.rounded(weight_OI, part.moments_II.diagonal()) - weight_OI
            costs.append(float((off_OI @ part.moments_II * off_OI).sum()))
        return 1 - costs[1] / max(costs[0], 1e-30)

    def end_cost(self, name: str, whole_VD: Tensor, sensitivities: Sensitivities, bits: int) -> float:
        grid, parts = Grid(bits, ENDS_GROUP), sensitivities.end(name)
        if not parts:
            return sensitivities.looked_up(grid.rounded(whole_VD) - whole_VD)
        (part,) = parts
        change_VD, some = tried(whole_VD, part, grid, True, TRIED_ON_ENDS)
        return part.cost(change_VD, some) + (sensitivities.looked_up(change_VD, some) if name == "embed" else 0.0)

    def neighbourhood(self, first: FirstOrder, found: dict[str, int]) -> dict[str, Any]:
        """The chosen errors at parts of their size: predicted and measured changes of the loss."""
        errors = {name: several[found[name]] for name, several in self.errors.items()}
        curvature = sum(several[found[name]] for name, several in self.curvatures.items())
        steps = first.neighbourhood(errors, curvature)
        rows = [{"size": of.size, "first": of.first, "second": of.second, "measured": of.measured} for of in steps]
        return {"steps": rows, "first_order_holds_to": holds_to(steps)}


def tried(weight_OI: Tensor, part: OutputSensitivity, grid: Grid, refine: bool, most: int) -> tuple[Tensor, slice]:
    """Some outputs are rounded as all will be in the end, or nearly so: how they change, and which they are."""
    some = slice(0, len(weight_OI), max(1, len(weight_OI) // most))
    some_OI = weight_OI[some]
    moments_II = damped(part.moments_II, DAMPING)
    steps = grid.fit(some_OI, moments_II.diagonal())
    codes_OI = grid.codes(some_OI, *steps)
    if refine:
        codes_OI, steps = refined(some_OI, moments_II, grid, codes_OI, steps, 1)
    return weights_of(grid, codes_OI, steps) - some_OI, some
