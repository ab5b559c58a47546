"""N:M sparsity: of every M neighbouring inputs of an output at most N stay (NxMTransformer, Holmes et al. 2021).

    moesaic compress out/smollm2 --method nm --out out/sparse n=2 m=4 score=wanda
    moesaic compress out/smollm2 --method nm --out out/sparse score=admm bits=4         and quantized (NxMiFormer, 2022)

score says which stay: the largest (magnitude), the largest times the size of their input (wanda), or those that an
alternating search leaves (admm): weights W follow the data and a copy Z keeps to N:M, until both agree; then what
stays is fitted once more. With bits, what stays is rounded as in GPTQ, and zeros stay zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import damped, gptq_codes
from moesaic.compress.grid import Grid
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.kernels.quantized import QuantizedMatrix


@dataclass(frozen=True)
class NM(LayerwiseCompressor):
    n: int = 2
    m: int = 4
    score: Literal["magnitude", "wanda", "admm"] = "admm"
    bits: int = 0  # 0: float
    group: int = 64
    rounds: int = 24

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
            weight_OI, kept_OI = self._admm(weight_OI, statistics.moments_II)
        else:
            size_I = statistics.importance_I.sqrt() if self.score == "wanda" else torch.ones_like(weight_OI[0])
            kept_OI = self._largest(weight_OI.abs() * size_I)
        if not self.bits:
            return weight_OI * kept_OI
        grid = Grid(self.bits, self.group)
        steps = grid.fit(weight_OI * kept_OI, statistics.importance_I)
        made = grid.made(gptq_codes(weight_OI, damped(statistics.moments_II, 0.01), grid, *steps, kept_OI), *steps)
        made.kept = (self.n, self.m)
        return made

    def _largest(self, scores_OI: Tensor) -> Tensor:
        """True for N of every M."""
        inputs = scores_OI.shape[1]
        scores_OXM = F.pad(scores_OI, (0, -inputs % self.m), value=-1).unflatten(1, (-1, self.m))
        best_OXN = scores_OXM.topk(self.n, dim=-1).indices
        kept_OXM = torch.zeros_like(scores_OXM, dtype=torch.bool).scatter_(-1, best_OXN, True)
        return kept_OXM.flatten(1)[:, :inputs]

    def _admm(self, weight_OI: Tensor, moments_II: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled so that every input counts alike in the projection, as in Wanda."""
        size_I = (moments_II.diagonal() + 0.01 * moments_II.diagonal().mean()).sqrt().clamp(min=1e-8)
        target_OI = weight_OI * size_I
        moments_II = moments_II / size_I / size_I[:, None]
        stiffness = 1.0  # of the tie between the two, in units of the moments' diagonal, which is one
        tied_II = moments_II + stiffness * torch.eye(len(size_I), device=size_I.device)
        solve_II = torch.linalg.inv(tied_II.double()).float()
        wanted_OI = target_OI @ moments_II
        kept_OI = self._largest(target_OI.abs())
        copy_OI, dual_OI = target_OI * kept_OI, torch.zeros_like(target_OI)
        for turn in range(2 * self.rounds):
            free_OI = (wanted_OI + stiffness * (copy_OI - dual_OI)) @ solve_II
            if turn < self.rounds:  # afterwards the choice stands, and only the values move
                kept_OI = self._largest((free_OI + dual_OI).abs())
            copy_OI = (free_OI + dual_OI) * kept_OI
            dual_OI = dual_OI + free_OI - copy_OI
        return copy_OI / size_I, kept_OI
