"""Fewer experts per layer: what each contributes to the calibration text, and a forward with those that stay."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.compress.calibration_statistics import CalibratedLayer
from moesaic.compress.job import Job
from moesaic.compress.layer_store import Part
from moesaic.compress.layers import collect_statistics, embedded, fit_in_experts, load_block, run_block
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.whole_only import refuse_reshaping


@dataclass(frozen=True)
class Use:
    """How much each expert gives to the tokens that chose it, in all (E), and how many those are (E)."""

    given_E: Tensor
    chosen_E: Tensor


@dataclass(frozen=True)
class ExpertReduction(Compressor):
    keep: int

    @property
    def ends_bits(self) -> int:
        return 0

    @abstractmethod
    def reduce(self, ffn: MixtureFeedForward, use: Use) -> tuple[Tensor, Tensor, Tensor]:
        """From a layer and its use: gate_up_EGD, down_EDF and the numbers of the experts whose router rows stay."""

    def run(self, job: Job) -> ModelConfig:
        return reduce_experts(job, self)


def reduce_experts(job: Job, method: ExpertReduction) -> ModelConfig:
    config, store, keep = job.config, job.store, method.keep
    refuse_reshaping(config, job.source, "Choose another method.")
    for number, layer in enumerate(config.layers):
        ffn = layer.ffn
        if isinstance(ffn, Experts) and (keep >= ffn.count or keep < ffn.per_token or keep % ffn.groups):
            problem = (
                f"must be below {ffn.count}, at least {ffn.per_token} and divide into {ffn.groups} groups, not {keep}"
            )
            raise UserError("keep", f"layer {number}: {problem}")
    if not config.has_experts:
        raise UserError(job.source, "has no experts", "Choose another method.")
    lengths = [len(tokens) for tokens in job.sequences]
    saved = store.state()
    start, x_TD = (saved[0], saved[1]["hidden_TD"].to(job.device)) if saved else (0, embedded(job))
    for number in range(start, len(config.layers)):
        job.progress("layer", number, len(config.layers))
        path = f"layers.{number}"
        block = load_block(job, path, config.layers[number], number)
        plain_TD, calibrated = collect_statistics(job, block, x_TD)
        part = Part()
        if isinstance(block.ffn, MixtureFeedForward):
            gate_up_EGD, down_EDF, stay_E = method.reduce(block.ffn, use(block.ffn, calibrated))
            router = block.ffn.router
            made = {"gate_up_EGD": gate_up_EGD, "down_EDF": down_EDF, "router.weight": router.weight[stay_E]}
            if router.correction is not None:
                made["router.correction"] = router.correction[stay_E]
            fit_in_experts(block.ffn, made, keep)
            part.plain = {f"{path}.ffn.{name}": tensor.detach().contiguous() for name, tensor in made.items()}
        x_TD = run_block(block, config, lengths, x_TD, job.kernels)
        part.facts = {"layer_error": float((x_TD - plain_TD).norm() / plain_TD.norm())}
        store.put(f"layer-{number:05}", part)
        store.put_state(number + 1, {"hidden_TD": x_TD})
    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, count=keep)) if isinstance(layer.ffn, Experts) else layer
        for layer in config.layers
    )
    # Layers that predict further tokens have experts of their own, which nothing was measured for.
    return replace(config, layers=layers, mtp=())


def use(ffn: MixtureFeedForward, calibrated: CalibratedLayer) -> Use:
    """An expert's gift to a token is the size of its output times its weight (as in REAP)."""
    count = len(ffn.down_EDF)
    given_E, chosen_E = ffn.down_EDF.new_zeros(2, count)
    for x_TD, routes in calibrated.calls():
        for expert in range(count):
            rows, choices = (routes.experts_TK == expert).nonzero(as_tuple=True)
            if len(rows):
                both_AG = F.linear(x_TD[rows], ffn.gate_up_EGD[expert])
                y_AD = F.linear(calibrated.plain.gated(both_AG, ffn.activation), ffn.down_EDF[expert])
                given_E[expert] += (y_AD.norm(dim=1) * routes.weights_TK[rows, choices]).sum()
                chosen_E[expert] += len(rows)
    return Use(given_E, chosen_E)


def most_useful(use: Use, keep: int, groups: int) -> Tensor:
    """The numbers of those that stay, as many in every group of experts."""
    given_GX = use.given_E.view(groups, -1)
    best_GX = given_GX.topk(keep // groups, dim=1).indices
    offset_G1 = torch.arange(groups, device=given_GX.device)[:, None] * given_GX.shape[1]
    return (best_GX + offset_G1).flatten().sort().values
