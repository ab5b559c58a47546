"""N:M sparsity: of every M neighbouring inputs of an output at most N stay (NxMTransformer, Holmes et al. 2021).

    moesaic compress out/smollm2 --method nm --out out/sparse n=2 m=4 score=wanda
    moesaic compress out/smollm2 --method nm --out out/sparse score=admm bits=4         and quantized (NxMiFormer, 2022)

score says which stay: the largest (magnitude), the largest times the size of their input (wanda), or those that an
alternating search leaves (admm): weights W follow the data and a copy Z keeps to N:M, until both agree; then what
stays is fitted once more. With bits, what stays is rounded as in GPTQ (rounding=rtn: to the nearest code, which is
what a model trained under the constraint `nm` expects), and zeros stay zeros. `compress/methods/nm_mixed.py` searches
n, m and bits for each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import damped, gptq_codes
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.train.constraints.nm import largest


@dataclass(frozen=True)
class NM(LayerwiseCompressor):
    n: int = 2
    m: int = 4
    score: Literal["magnitude", "wanda", "admm"] = "admm"
    bits: int = 0  # 0: float
    group: int = 64
    rounds: int = 24
    rounding: Literal["gptq", "rtn"] = "gptq"

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise ValueError(f"n must be from 1 to below m, not {self.n} of {self.m}")
        if self.bits:
            Grid(self.bits, self.group)
        if self.bits == 1:
            raise ValueError("one bit has no zero")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {self.rounds}")

    @property
    def ends_bits(self) -> int:
        return 8 if self.bits else 0

    def matrix(self, name: str, weight_OI: Tensor, statistics: InputStatistics) -> QuantizedMatrix | Tensor:
        if self.score == "admm":
            weight_OI, kept_OI = admm(weight_OI, statistics.moments_II, self.n, self.m, self.rounds)
        else:
            size_I = statistics.importance_I.sqrt() if self.score == "wanda" else torch.ones_like(weight_OI[0])
            kept_OI = largest(weight_OI.abs() * size_I, self.n, self.m)
        if not self.bits:
            return weight_OI * kept_OI
        return quantized_kept(
            weight_OI, kept_OI, statistics, Grid(self.bits, self.group), (self.n, self.m), self.rounding
        )


def quantized_kept(
    weight_OI: Tensor,
    kept_OI: Tensor,
    statistics: InputStatistics,
    grid: Grid,
    kept: tuple[int, int],
    rounding: Literal["gptq", "rtn"],
) -> QuantizedMatrix:
    """The kept weights as codes, the others as the code of zero."""
    if rounding == "rtn":
        made = grid.matrix(weight_OI * kept_OI)
    else:
        steps = grid.fit(weight_OI * kept_OI, statistics.importance_I)
        made = grid.made(gptq_codes(weight_OI, damped(statistics.moments_II, 0.01), grid, *steps, kept_OI), *steps)
    made.kept = kept
    return made


def admm(weight_OI: Tensor, moments_II: Tensor, n: int, m: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Scaled so that every input counts alike in the projection, as in Wanda."""
    size_I = (moments_II.diagonal() + 0.01 * moments_II.diagonal().mean()).sqrt().clamp(min=1e-8)
    target_OI = weight_OI * size_I
    moments_II = moments_II / size_I / size_I[:, None]
    stiffness = 1.0  # of the tie between the two, in units of the moments' diagonal, which is one
    tied_II = moments_II + stiffness * torch.eye(len(size_I), device=size_I.device)
    solve_II = torch.linalg.inv(tied_II.double()).float()
    wanted_OI = target_OI @ moments_II
    kept_OI = largest(target_OI.abs(), n, m)
    copy_OI, dual_OI = target_OI * kept_OI, torch.zeros_like(target_OI)
    for turn in range(2 * rounds):
        free_OI = (wanted_OI + stiffness * (copy_OI - dual_OI)) @ solve_II
        if turn < rounds:  # afterwards the choice stands, and only the values move
            kept_OI = largest((free_OI + dual_OI).abs(), n, m)
        copy_OI = (free_OI + dual_OI) * kept_OI
        dual_OI = dual_OI + free_OI - copy_OI
    return copy_OI / size_I, kept_OI
