"""Compress one layer after the other, one in memory at a time: load, calibrate, compress, store, run what came out.

Each layer is calibrated on what the compressed layers before it let through, so that it can make up for their errors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moesaic.compress.calibration_statistics import CalibratedLayer, InputStatistics, uniform_statistics
from moesaic.compress.gptq_rounding import gptq
from moesaic.compress.job import Job
from moesaic.compress.layer_store import Part, rounded_scales
from moesaic.compress.layers import (
    collect_statistics,
    embedded,
    fit_in,
    load_block,
    load_further,
    normed,
    quantized_kernels,
    run_block,
)
from moesaic.compress.methods import Compressor
from moesaic.compress.saliency import measure_saliency
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.block import Block
from moesaic.model.config import ModelConfig
from moesaic.model.formats.float_matrix import FloatMatrix
from moesaic.model.matrices import matrices_of

# Of the embedding and the output matrix, which is often the embedding too: what is damped more stays nearer to that.
ENDS_GROUP, ENDS_DAMPING, ENDS_TURNS = 64, 0.1, 2

MatrixCompressor = Callable[[str, Tensor, InputStatistics], QuantizedMatrix | FloatMatrix | Tensor]


class LayerwiseCompressor(Compressor):
    """Quantizes or sparsifies one matrix after the other."""

    @property
    def uses_saliency(self) -> bool:
        """Whether the moments of the inputs are weighed by each token's saliency."""
        return self.reads_text

    @abstractmethod
    def matrix(
        self, name: str, weight_OI: Tensor, statistics: InputStatistics
    ) -> QuantizedMatrix | FloatMatrix | Tensor:
        """A matrix made smaller, or a plain one with other values. An expert's number is the last of `name`."""

    def matrix_compressor(self, job: Job) -> MatrixCompressor:
        """What makes the matrices of this job; here is the place to look at the whole model first."""
        return self.matrix

    def end_bits(self, job: Job, name: str) -> int:
        """Of the embedding or the output matrix, where they are made smaller at all."""
        return job.ends_bits

    def prepare(self, block: Block, calibrated: CalibratedLayer) -> dict[str, Tensor]:
        """Change a layer before its matrices are taken; returns the small parameters that are new."""
        return {}

    def run(self, job: Job) -> ModelConfig:
        walk(job, self)
        return job.config


def walk(job: Job, method: LayerwiseCompressor) -> None:
    make = method.matrix_compressor(job)
    config, store = job.config, job.store
    count = len(config.layers)
    start, hidden = 0, []
    lengths = [len(tokens) for tokens in job.sequences]
    if method.reads_text:
        saved = store.state()
        if saved is None:
            hidden = [embedded(job)]
        else:
            start, hidden = saved[0], [saved[1]["hidden_TD"].to(job.device)]
    for number, layer in enumerate(config.layers):
        name = f"layer-{number:05}"
        job.progress("layer", number, count)
        if number < start if method.reads_text else store.has(name):
            continue
        block = load_block(job, f"layers.{number}", layer, number)
        if not method.reads_text:
            store.put(name, compressed(block, f"layers.{number}", method, make, None))
            continue
        plain_TD, calibrated = collect_statistics(job, block, hidden[0])
        changed = method.prepare(block, calibrated)
        if changed:  # the statistics belong to the weights before
            _, calibrated = collect_statistics(job, block, hidden[0])
        if method.uses_saliency:
            measure_saliency(block, calibrated)
        part = compressed(block, f"layers.{number}", method, make, calibrated)
        part.plain |= {f"layers.{number}.{key}": tensor for key, tensor in changed.items()}
        del calibrated
        fit_in(block, f"layers.{number}", part)
        after_TD = run_block(block, config, lengths, hidden[0], quantized_kernels(job))
        off = (after_TD - plain_TD).norm() / plain_TD.norm()
        part.facts["layer_error"] = float(off)
        store.put(name, part)
        store.put_state(number + 1, {"hidden_TD": after_TD})
        hidden = [after_TD]
    job.progress("layer", count, count)
    for number, layer in enumerate(config.mtp):
        if not store.has(f"further-{number:05}"):
            further = load_further(job, layer, number)
            store.put(f"further-{number:05}", compressed(further, f"mtp.{number}", method, make, None))
    if job.ends_bits and not store.has("ends"):
        job.progress("ends", 0, 1)
        last_TD = normed(job, hidden[0]) if method.reads_text else None
        store.put("ends", Part({name: end_matrix(job, method, name, last_TD) for name in ends(config)}))


def ends(config: ModelConfig) -> list[str]:
    return ["embed"] if config.tied else ["embed", "head"]


def end_matrix(job: Job, method: LayerwiseCompressor, name: str, last_TD: Tensor | None) -> QuantizedMatrix:
    """The output matrix is rounded for what flows into it; an embedding that is only looked up, to what is nearest."""
    grid, whole_VD = Grid(method.end_bits(job, name), ENDS_GROUP), job.tensor(name)
    if last_TD is None or name != ends(job.config)[-1]:
        return rounded_scales(grid.matrix(whole_VD))
    return rounded_scales(gptq(whole_VD, InputStatistics(last_TD), grid, ENDS_DAMPING, ENDS_TURNS))


@torch.no_grad()
def compressed(
    module: nn.Module,
    path: str,
    method: LayerwiseCompressor,
    make: MatrixCompressor,
    calibrated: CalibratedLayer | None,
) -> Part:
    part = Part()
    errors, shares = {}, {}
    for name, weight_OI in matrices_of(module):
        statistics = (calibrated.statistics(name) if calibrated is not None else None) or uniform_statistics(weight_OI)
        made = make(f"{path}.{name}", weight_OI.detach(), statistics)
        if isinstance(made, QuantizedMatrix):
            part.matrices[f"{path}.{name}"] = rounded_scales(made)
        elif isinstance(made, FloatMatrix):
            part.floats[f"{path}.{name}"] = made
        else:
            part.plain[f"{path}.{name}"] = made
        errors[name] = statistics.error(weight_OI, made if isinstance(made, Tensor) else made.dense())
        shares[name] = statistics.share
    part.facts = {"errors": errors, "shares": shares}
    return part
