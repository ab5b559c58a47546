"""How many calibration samples are enough: as many as it takes until twice as many round hardly better.

Some outputs of a few matrices are rounded with the moments of 8, 16, 32, ... samples, and the error is measured on
samples that are not counted. Only as many are read as it takes. Layers are the original ones here, so that the answer
does not depend on the method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.compress.gptq_rounding import damped
from moesaic.compress.job import Job
from moesaic.compress.layer_store import Part
from moesaic.compress.layers import context_of, load_block
from moesaic.compress.refine import refined, squared_error
from moesaic.kernels.grid import Grid
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.linear import Linear

MOST_SAMPLES, FEWEST, ASIDE = 64, 8, 4
GAIN = 0.02  # of the error that twice as many samples must save to be worth it
LAYERS_READ = 3  # the first ones: each more is read for all samples
TRIED_ON = 32  # outputs of a matrix
GRID = Grid(4, 64, symmetric=False)
DAMPING = 0.03


def enough_samples(job: Job) -> int:
    """Of `job.sequences`, which are in a good order: any prefix has its share of each kind."""
    if not job.store.has("samples"):
        job.store.put("samples", Part(facts={"count": converged(job)}))
    count: int = job.store.about("samples")["facts"]["count"]
    return count


def converged(job: Job) -> int:
    most = len(job.sequences)
    if most <= FEWEST + ASIDE:
        return most
    probe = _Probe(job)
    aside, counted = job.sequences[:ASIDE], job.sequences[ASIDE:]
    probe.read(aside)
    held = probe.take()
    probe.read(counted[:FEWEST])
    count, last = FEWEST, probe.loss(held)
    while count < len(counted):
        job.progress("counting samples", count, most)
        more = min(2 * count, len(counted))
        probe.read(counted[count:more])
        count, loss = more, probe.loss(held)
        if loss > last * (1 - GAIN):
            break
        last = loss
    return min(count + ASIDE, most)


class _Probe(WrappedKernels):
    """Kernels that keep the moments of what flows into the plain matrices of the first layers."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.kernels)
        self._job, self._tokens = job, 0
        layers = list(enumerate(job.config.layers))[:LAYERS_READ]
        self._blocks = [load_block(job, f"layers.{number}", layer, number) for number, layer in layers]
        self._weights = {
            part.site: part.weight[:: max(1, len(part.weight) // TRIED_ON)]
            for block in self._blocks
            for part in block.modules()
            if isinstance(part, Linear)
        }
        self._moments: dict[str, Tensor] = {}

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor:
        if site in self._weights:
            self._moments[site] = self._moments.get(site, 0) + x_TI.T @ x_TI
        return self.plain.linear(x_TI, weight_OI, bias_O, site)

    @torch.no_grad()
    def read(self, sequences: list[list[int]]) -> None:
        for tokens in sequences:
            x_TD = self._job.parts.tensor("embed")[torch.tensor(tokens)].to(self._job.device, torch.float32)
            context = context_of(self._job.config, [len(tokens)], self, self._job.device)
            for block in self._blocks:
                x_TD = block(x_TD, context)
            self._tokens += len(tokens)

    def take(self) -> dict[str, Tensor]:
        """The moments so far, which are forgotten."""
        found = {site: moments_II / self._tokens for site, moments_II in self._moments.items()}
        self._moments, self._tokens = {}, 0
        return found

    def loss(self, held: dict[str, Tensor]) -> float:
        """On the samples set aside, as a share of the output, where rounding goes by the others."""
        losses = []
        for site, moments_II in self._moments.items():
            some_OI, fitted_II = self._weights[site], damped(moments_II / self._tokens, DAMPING)
            steps = GRID.fit(some_OI, fitted_II.diagonal())
            codes_OI, steps = refined(some_OI, fitted_II, GRID, GRID.codes(some_OI, *steps), steps, 1)
            size = float((some_OI @ held[site] * some_OI).sum()) or 1.0
            losses.append(squared_error(some_OI, held[site], GRID, codes_OI, steps) / size)
        return sum(losses) / max(len(losses), 1)
