"""MiLo (Huang et al. 2025): three or four bits and a correction of low rank, larger where a matrix is harder to round.

    moesaic compress out/mixture --method milo --out out/small bits=3 group=64 rank=32
    moesaic compress out/mixture --method milo --out out/small bits=3 group=64 calibrate=false

W is taken apart into codes and U V in turns: the codes of W - U V, then U V from what the codes left over. Matrices
that every token passes (attention, dense and shared networks) get `rank`; of the routed experts' equal budget each gets
a share by the kurtosis of its weights (heavy tails round badly) and by how often it is chosen. U and V are quantized
too: twice the rank in four bits is worth more than half of it in eight. U is stored in blocks of 32, so that ranks
which are multiples of it waste nothing.

The paper reads no text: `calibrate=false` is that. With it, errors count by what flows into the matrix: the codes come
from GPTQ, and the correction from the singular values of the error at the output. It takes many turns until the two
have parted the work between them; codes found anew by GPTQ get further than the old ones refined, but not for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import TURNS, Piece, damped, joined, pieces, rounded
from moesaic.compress.layerwise import LayerwiseCompressor, MatrixCompressor
from moesaic.compress.methods.hqq import half_quadratic
from moesaic.compress.refine import refined
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from moesaic.compress.job import Job

LEAST_GAIN = 1e-3  # of the error, for another turn
DAMPING = 0.03  # of the moments that the correction goes by; see `compress/gptq_rounding.py`
ANEW = 3  # turns in which GPTQ finds the codes anew


@dataclass(frozen=True)
class MiLo(LayerwiseCompressor):
    bits: int = 3
    group: int = 64
    rank: int = 32
    expert_rank: int = 16  # on average
    correction_bits: int = 4
    turns: int = 8
    calibrate: bool = True
    symmetric: bool = False

    own_layout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Grid(self.bits, self.group)
        Grid(self.correction_bits, 32)
        if self.rank < 0 or self.expert_rank < 0 or self.turns < 1:
            raise ValueError("ranks must not be negative, and turns at least 1")

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        kurtoses: dict[str, float] = {}

        def make(name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
            path, _, leaf = name.rpartition(".")
            if not leaf.isdigit():
                return self._taken_apart(weight_OI, statistics, self.rank)
            if path not in kurtoses:  # the mean over the experts of a layer, whose ranks are given out around it
                whole_EOI = job.tensor(path)
                kurtoses[path] = sum(map(_kurtosis, whole_EOI)) / len(whole_EOI)
            usual = _per_token_share(job, path)
            often = min(max(statistics.share / usual, 0.25), 4.0) if self.calibrate and statistics.share < 1 else 1.0
            rank = self.expert_rank * (_kurtosis(weight_OI) / kurtoses[path]) ** 0.5 * often**0.5
            return self._taken_apart(weight_OI, statistics, round(rank))

        return make

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return self._taken_apart(weight_OI, statistics, self.rank)

    def _taken_apart(self, weight_OI: Tensor, statistics: InputStatistics, rank: int) -> QuantizedMatrix:
        rank = min(rank, *weight_OI.shape)
        if self.calibrate:
            return self._by_what_flows(weight_OI, statistics, rank)
        low_OI = torch.zeros_like(weight_OI)
        best: QuantizedMatrix | None = None
        least = float("inf")
        for _ in range(self.turns):
            made = half_quadratic(weight_OI - low_OI, Grid(self.bits, self.group, symmetric=False), 20)
            if not rank:
                return made
            left_OI = weight_OI - made.own()
            made.down_RI, made.up_OR = map(self._quantized, alike(*_largest(left_OI, rank)))
            low_OI = made.up_OR.dense() @ made.down_RI.dense()
            error = float((left_OI - low_OI).square().sum())
            if error >= least * (1 - LEAST_GAIN):
                break
            best, least = made, error
        assert best is not None
        return best

    def _by_what_flows(self, weight_OI: Tensor, statistics: InputStatistics, rank: int) -> QuantizedMatrix:
        grid = Grid(self.bits, self.group, self.symmetric)
        made = pieces(weight_OI, statistics, grid, turns=1 if rank else TURNS)
        if not rank:
            return joined(grid, made)
        root_II, back_II = _root(damped(statistics.moments_II, DAMPING))
        best: QuantizedMatrix | None = None
        least = float("inf")
        for turn in range(self.turns):
            left_OI = weight_OI - joined(grid, made).dense()
            v_RI, _ = alike(*_largest(left_OI @ root_II, rank))
            down = self._quantized(v_RI @ back_II)
            up = self._quantized(_fitted(left_OI, down.dense(), made))
            low_OI = up.dense() @ down.dense()
            off_OI = left_OI - low_OI
            error = sum(float((off_OI[of.rows] @ of.moments_II * off_OI[of.rows]).sum()) for of in made)
            if error < least:
                best, least = joined(grid, made), error
                best.down_RI, best.up_OR = down, up
            if turn + 1 < self.turns:
                for of in made:
                    wanted_OI = weight_OI[of.rows] - low_OI[of.rows]
                    if turn < ANEW:
                        of.codes_OI, of.steps = rounded(wanted_OI, of.moments_II, grid, 1)
                    else:
                        of.codes_OI, of.steps = refined(wanted_OI, of.moments_II, grid, of.codes_OI, of.steps, 1)
        assert best is not None
        return best

    def _quantized(self, part: Tensor) -> QuantizedMatrix:
        return Grid(self.correction_bits, 64).matrix(part)


def alike(u_OR: Tensor, v_RI: Tensor) -> tuple[Tensor, Tensor]:
    """V and U with their columns and rows alike in size, so that they are alike in steps."""
    size_R = (u_OR.norm(dim=0) / v_RI.norm(dim=1)).sqrt().clamp(min=1e-12, max=1e12)  # nothing may be left over
    return v_RI * size_R[:, None], u_OR / size_R


def _fitted(left_OI: Tensor, down_RI: Tensor, made: list[Piece]) -> Tensor:
    """The best U for this V; what flows in counts otherwise for each part of the outputs."""
    found = []
    for of in made:
        seen_RI = down_RI @ of.moments_II
        system_RR = (seen_RI @ down_RI.T).double()
        system_RR.diagonal().mul_(1 + 1e-6).add_(1e-12)
        found.append(torch.linalg.solve(system_RR, (seen_RI @ left_OI[of.rows].T).double()).T.float())
    return torch.cat(found)


def _largest(off_OI: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best (O, R) @ (R, I), from the eigenvectors of the smaller side's products."""
    outputs, inputs = off_OI.shape
    if outputs <= inputs:
        u_OR = torch.linalg.eigh((off_OI @ off_OI.T).double()).eigenvectors[:, -rank:].flip(1).float()
        return u_OR, u_OR.T @ off_OI
    v_IR = torch.linalg.eigh((off_OI.T @ off_OI).double()).eigenvectors[:, -rank:].flip(1).float()
    return off_OI @ v_IR, v_IR.T.contiguous()


def low_rank_shares(error_OI: Tensor, moments_II: Tensor, rank: int) -> float:
    """The share of an error at the output that the best correction of a rank leaves."""
    root_II, _ = _root(moments_II)
    squares = torch.linalg.svdvals(error_OI @ root_II).square()
    return float(squares[rank:].sum() / squares.sum().clamp(min=1e-30))


def _kurtosis(weight_OI: Tensor) -> float:
    centred = weight_OI.float() - weight_OI.float().mean()
    return float(centred.pow(4).mean() / centred.square().mean().square().clamp(min=1e-20))


def _per_token_share(job: Job, path: str) -> float:
    """How often an expert is chosen if all are alike."""
    number = int(path.split(".")[1])
    layers = job.config.mtp if path.startswith("mtp") else job.config.layers
    ffn = layers[number].ffn
    return getattr(ffn, "per_token", 1) / getattr(ffn, "count", 1)


def _root(moments_II: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of the moments and its inverse: errors seen through it are errors at the output."""
    values_I, vectors_II = torch.linalg.eigh(moments_II.double())
    values_I = values_I.clamp(min=float(values_I.max()) * 1e-6).sqrt()
    root_II = vectors_II * values_I @ vectors_II.T
    back_II = vectors_II / values_I @ vectors_II.T
    return root_II.float(), back_II.float()
