"""A model's layers by themselves: load one, run it, collect its calibration statistics, put in what was made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from moesaic.compress.calibration_statistics import TOKENS_AT_ONCE, CalibratedLayer, RecordingKernels
from moesaic.compress.layer_store import Part
from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.kernels.quantized import QuantizedKernels, QuantizedMatrix
from moesaic.model.block import Block, PredictionBlock
from moesaic.model.config import Layer, ModelConfig, Reading
from moesaic.model.context import ForwardContext
from moesaic.model.directory import install
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.layout import Layout
from moesaic.model.linear import Norm, name_sites
from moesaic.model.rope import rope_of

if TYPE_CHECKING:
    from moesaic.compress.job import Job


def normed(job: Job, x_TD: Tensor) -> Tensor:
    """What the last layer gives, as the output matrix sees it."""
    norm = Norm(job.config.hidden, job.config.norm_eps)
    norm.weight.data = job.tensor("norm.weight")
    with torch.no_grad():
        out_TD: Tensor = norm(x_TD, job.kernels)
    return out_TD


def collect_statistics(job: Job, block: Block, x_TD: Tensor) -> tuple[Tensor, CalibratedLayer]:
    """What comes out of a layer, and what flowed into its matrices."""
    recorder = RecordingKernels(job.kernels)
    lengths = [len(tokens) for tokens in job.sequences]
    out_TD = run_block(block, job.config, lengths, x_TD, cast(Kernels, recorder))

    def pieces(ops: Kernels) -> Iterator[tuple[slice, Callable[[Block], Tensor]]]:
        for rows, some in chunks(lengths):
            yield rows, partial(_apply, x_TD=x_TD[rows], context=context_of(job.config, some, ops, job.device))

    return out_TD, CalibratedLayer(block, recorder, job.min_expert_tokens, pieces, out_TD)


def _apply(block: Block, x_TD: Tensor, context: ForwardContext) -> Tensor:
    out_TD: Tensor = block(x_TD, context)
    return out_TD


def quantized_kernels(job: Job) -> Kernels:
    return cast(Kernels, QuantizedKernels(job.kernels))


def embedded(job: Job) -> Tensor:
    tokens_T = torch.tensor([token for tokens in job.sequences for token in tokens])
    return job.parts.tensor("embed")[tokens_T].to(job.device, torch.float32)


def load_block(job: Job, path: str, layer: Layer, number: int) -> Block:
    if isinstance(layer.ffn, Reading) or job.config.norm != "pre":
        problem = "reads a knowledge base, or norms after each half: no method that goes layer by layer knows that"
        raise UserError(job.source, problem, "Compress another model.")
    with torch.device("meta"):
        block = Block(job.config, layer, number)
    name_sites(block)
    return cast(Block, _filled(job, block, path))


def load_further(job: Job, layer: Layer, number: int) -> PredictionBlock:
    with torch.device("meta"):
        block = PredictionBlock(job.config, layer, len(job.config.layers) + number)
    return cast(PredictionBlock, _filled(job, block, f"mtp.{number}"))


def _filled(job: Job, module: nn.Module, path: str) -> nn.Module:
    state = {name: job.tensor(f"{path}.{name}") for name in module.state_dict()}
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False)


def chunks(lengths: list[int]) -> Iterator[tuple[slice, list[int]]]:
    """Sequences side by side, as many as are run at once."""
    start = 0
    taken: list[int] = []
    for length in lengths:
        if taken and sum(taken) + length > TOKENS_AT_ONCE:
            yield slice(start, start + sum(taken)), taken
            start, taken = start + sum(taken), []
        taken.append(length)
    if taken:
        yield slice(start, start + sum(taken)), taken


def context_of(config: ModelConfig, lengths: list[int], ops: Kernels, device: torch.device) -> ForwardContext:
    layout = Layout(lengths, device=device)
    return ForwardContext(layout, ops, rope_of(config, layout))


@torch.no_grad()
def run_block(block: Block, config: ModelConfig, lengths: list[int], x_TD: Tensor, ops: Kernels) -> Tensor:
    return torch.cat([block(x_TD[rows], context_of(config, some, ops, x_TD.device)) for rows, some in chunks(lengths)])


def fit_in(module: nn.Module, path: str, part: Part) -> None:
    """Put what was made in the place of what it was made from."""
    experts: dict[str, dict[int, QuantizedMatrix]] = {}
    for name, matrix in part.matrices.items():
        own = name.removeprefix(f"{path}.")
        stem, _, leaf = own.rpartition(".")
        if leaf.isdigit():
            experts.setdefault(stem, {})[int(leaf)] = matrix
        else:
            install(module, own, matrix, torch.float32)
    for stem, by_number in experts.items():
        install(module, stem, nn.ModuleList(by_number[number] for number in sorted(by_number)), torch.float32)
    parameters = dict(module.named_parameters())
    dense = {name: numbers.dense() for name, numbers in part.floats.items()}
    for name, tensor in (part.plain | dense).items():
        own = name.removeprefix(f"{path}.")
        stem, _, leaf = own.rpartition(".")
        target = parameters[stem][int(leaf)] if leaf.isdigit() else parameters[own]
        target.data.copy_(tensor)


def fit_in_experts(ffn: MixtureFeedForward, made: dict[str, Tensor], count: int) -> None:
    """A mixture with other experts, and as many as `count`."""
    ffn.gate_up_EGD = nn.Parameter(made["gate_up_EGD"], requires_grad=False)
    ffn.down_EDF = nn.Parameter(made["down_EDF"], requires_grad=False)
    ffn.router.weight = nn.Parameter(made["router.weight"], requires_grad=False)
    if "router.correction" in made:
        ffn.router.correction = made["router.correction"]
    ffn.router.shape = replace(ffn.router.shape, count=count)
