"""Intrinsic Sparse Structures (Wen et al. 2018): leave out hidden units of feed-forward networks, as wholes.

    moesaic compress out/smollm2 --method iss --out out/narrow keep=0.75
    moesaic compress out/smollm2 --method iss --out out/narrow keep=0.75 score=lasso

A hidden unit is its row of the gate, its row of up and its column of down: without it all three are one smaller, and
the network stays dense. The paper's own way, a group Lasso while the model is trained, is `train.constraint: {name:
iss}` (`moesaic/train/constraints/iss.py`); `score=magnitude refit=false` packs what comes out of that. Here nothing is
trained. With `score=lasso` the group Lasso goes layer by layer, on what flows into `down`: the penalty drives whole
columns to zero until `keep` of them are left, and is weighed anew a few times by what it left (the adaptive Lasso),
which parts units that say the same. `score=leverage` draws units (column sampling), one after the other, each with the
chance that its output has of not being said by those drawn before (randomly pivoted Cholesky), which loses less still.
`magnitude` and `random` are what both must beat. Then down is fitted anew, so that the units that stay make up for
those that went.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from moesaic.compress.calibration_statistics import InputStatistics, uniform_statistics
from moesaic.compress.job import Job
from moesaic.compress.layer_store import Part
from moesaic.compress.layers import collect_statistics, embedded, load_block, run_block
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.model.config import Dense, Experts, ModelConfig, Reading
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward
from moesaic.model.whole_only import refuse_reshaping
from moesaic.train.constraints.iss import units_left

RIDGE = 1e-2  # of the mean of the moments' diagonal
ROUNDS, HALVINGS, PROXIMAL_STEPS = 3, 10, 20


@dataclass(frozen=True)
class IntrinsicSparseStructures(Compressor):
    keep: float = 0.75
    score: Literal["leverage", "lasso", "magnitude", "random"] = "leverage"
    refit: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise ValueError(f"keep must be a share between 0 and 1, not {self.keep}")

    @property
    def ends_bits(self) -> int:
        return 0

    def run(self, job: Job) -> ModelConfig:
        config, store = job.config, job.store
        refuse_reshaping(config, job.source, "Choose another method.")
        lengths = [len(tokens) for tokens in job.sequences]
        saved = store.state()
        start, x_TD = (saved[0], saved[1]["hidden_TD"].to(job.device)) if saved else (0, embedded(job))
        for number in range(start, len(config.layers)):
            job.progress("layer", number, len(config.layers))
            block = load_block(job, f"layers.{number}", config.layers[number], number)
            plain_TD, calibrated = collect_statistics(job, block, x_TD)
            made = self._narrowed(block.ffn, calibrated.statistics, number)
            part = Part(plain={f"layers.{number}.ffn.{name}": t.detach().contiguous() for name, t in made.items()})
            _fit_in(block.ffn, made)
            x_TD = run_block(block, config, lengths, x_TD, job.kernels)
            part.facts = {"layer_error": float((x_TD - plain_TD).norm() / plain_TD.norm())}
            store.put(f"layer-{number:05}", part)
            store.put_state(number + 1, {"hidden_TD": x_TD})
        layers = tuple(replace(layer, ffn=self._smaller(layer.ffn)) for layer in config.layers)
        return replace(config, layers=layers, mtp=())  # nothing was measured for layers that predict further tokens

    def left(self, hidden: int) -> int:
        return units_left(hidden, self.keep)

    def _smaller(self, ffn: Dense | Experts | Reading) -> Dense | Experts:
        assert not isinstance(ffn, Reading), "was refused"
        return replace(ffn, hidden=self.left(ffn.hidden))

    @torch.no_grad()
    def _narrowed(self, ffn: nn.Module, of: Callable[[str], InputStatistics | None], layer: int) -> dict[str, Tensor]:
        if isinstance(ffn, DenseFeedForward):
            if ffn.gate_up.bias is not None or len(ffn.gate_up.weight) != 2 * ffn.down.weight.shape[1]:
                raise UserError("iss", "takes gated networks without biases", "Choose another method.")
            seen = of("ffn.down.weight") or uniform_statistics(ffn.down.weight)
            gate_up_GD, down_DF = self.narrowed(ffn.gate_up.weight, ffn.down.weight, seen, layer)
            return {"gate_up.weight": gate_up_GD, "down.weight": down_DF}
        assert isinstance(ffn, MixtureFeedForward)
        pairs = []
        for expert, down_DF in enumerate(ffn.down_EDF.data):
            seen = of(f"ffn.down_EDF.{expert}") or uniform_statistics(down_DF)
            pairs.append(self.narrowed(ffn.gate_up_EGD[expert], down_DF, seen, layer * len(ffn.down_EDF) + expert))
        return {
            "gate_up_EGD": torch.stack([gate_up for gate_up, _ in pairs]),
            "down_EDF": torch.stack([down for _, down in pairs]),
        }

    def narrowed(
        self, gate_up_GD: Tensor, down_DF: Tensor, statistics: InputStatistics, number: int = 0
    ) -> tuple[Tensor, Tensor]:
        """A network with fewer hidden units."""
        hidden = down_DF.shape[1]
        moments_FF = statistics.moments_II
        kept = self.units(down_DF, moments_FF, self.left(hidden), number)
        if self.refit:
            ridge = RIDGE * moments_FF.diagonal().mean().clamp(min=1e-8)
            system = moments_FF[kept][:, kept] + ridge * torch.eye(len(kept), device=kept.device)
            wanted = moments_FF[kept] @ down_DF.T + ridge * down_DF[:, kept].T
            narrow_DF = torch.linalg.solve(system.double(), wanted.double()).T.float()
        else:
            narrow_DF = down_DF[:, kept]
        return gate_up_GD[torch.cat([kept, kept + hidden])], narrow_DF

    def units(self, down_DF: Tensor, moments_FF: Tensor, count: int, number: int = 0) -> Tensor:
        """Those that stay, in their order."""
        if self.score == "lasso":
            sizes_F = lasso_sizes(down_DF, moments_FF, count)
        elif self.score == "leverage":
            generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
            return drawn_columns(down_DF, moments_FF, count, generator).sort().values
        elif self.score == "magnitude":
            sizes_F = down_DF.norm(dim=0)
        else:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
            sizes_F = torch.rand(down_DF.shape[1], generator=generator).to(down_DF.device)
        return sizes_F.topk(count).indices.sort().values


def drawn_columns(down_DF: Tensor, moments_FF: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Units drawn by what is left of the moments of their outputs once those drawn before are known."""
    size_F = down_DF.norm(dim=0)
    outputs_FF = (moments_FF * size_F * size_F[:, None]).double().cpu()
    left_F, factor_FC = outputs_FF.diagonal().clone(), outputs_FF.new_zeros(len(outputs_FF), count)
    chosen: list[int] = []
    for place in range(count):
        chances_F = left_F.clamp(min=1e-12 * float(outputs_FF.diagonal().max()))
        chances_F[chosen] = 0
        unit = int(torch.multinomial(chances_F, 1, generator=generator))
        column_F = outputs_FF[:, unit] - factor_FC[:, :place] @ factor_FC[unit, :place]
        factor_FC[:, place] = column_F / column_F[unit].clamp(min=1e-20).sqrt()
        left_F -= factor_FC[:, place].square()
        chosen.append(unit)
    return torch.tensor(chosen, device=down_DF.device)


def lasso_sizes(down_DF: Tensor, moments_FF: Tensor, count: int) -> Tensor:
    """The sizes of down's columns, as outputs, under the group Lasso penalty that leaves `count` of them."""
    scale_F = moments_FF.diagonal().clamp(min=1e-12).sqrt()
    moments_FF = moments_FF / scale_F / scale_F[:, None]  # of units of one size
    goal_DF = down_DF * scale_F
    rate = 1 / float(torch.linalg.eigvalsh(moments_FF)[-1])
    found_DF, weighs_F = goal_DF, torch.ones_like(scale_F)
    for _ in range(ROUNDS):
        low, high = 0.0, float(((goal_DF @ moments_FF).norm(dim=0) / weighs_F).max())
        for _ in range(HALVINGS):
            penalty, found_DF = (low + high) / 2, goal_DF
            for _ in range(PROXIMAL_STEPS):
                moved_DF = found_DF + rate * (goal_DF - found_DF) @ moments_FF
                size_F = moved_DF.norm(dim=0).clamp(min=1e-20)
                found_DF = moved_DF * (1 - rate * penalty * weighs_F / size_F).clamp(min=0)
            alive = int((found_DF.norm(dim=0) > 0).sum())
            if alive == count:
                break
            low, high = (penalty, high) if alive > count else (low, penalty)
        left_F = found_DF.norm(dim=0)
        weighs_F = 1 / (left_F + 0.1 * left_F.mean())
    # Where none of the penalties left exactly so many, those that came nearest to staying fill up.
    return found_DF.norm(dim=0) + 1e-6 * goal_DF.norm(dim=0)


def _fit_in(ffn: nn.Module, made: dict[str, Tensor]) -> None:
    for name, tensor in made.items():
        path, _, leaf = name.rpartition(".")
        setattr(ffn.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))
