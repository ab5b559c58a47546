"""Make the better of two answers likelier: DPO, its conservative form, IPO, SLiC's hinge; without a reference, SimPO.

    objective: {kind: sigmoid, beta: 0.1, smoothing: 0.1, sft: 0.2}

The batch holds chosen and rejected answers in turn, and at their tokens how likely each was before (`reference`). An
answer's reward is how much likelier it became, in units of 1 / beta; the loss falls as the chosen one's lead grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.context import Routing
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective, layout_of


@dataclass(frozen=True)
class Preference(Objective):
    of_text: ClassVar[bool] = False

    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    beta: float = 0.1
    smoothing: float = 0.0  # of sigmoid: the share of pairs that may be the wrong way round (conservative DPO)
    normalised: bool | None = None  # an answer's log-probability per token; by default of ipo only
    reference: bool = True  # against the weights before the stage; SimPO goes without, and is normalised
    margin: float = 0.0  # the lead that is asked for beyond none (SimPO's gamma); a pair's own margin is added
    sft: float = 0.0  # weight of the chosen answer's loss per token (RPO): keeps its likelihood from falling

    def __post_init__(self) -> None:
        if not self.beta > 0 or not 0 <= self.smoothing < 0.5 or self.sft < 0 or self.margin < 0:
            raise ValueError("beta is above 0, smoothing from 0 to below 0.5, sft and margin are not negative")
        if self.smoothing and self.kind != "sigmoid":
            raise ValueError("smoothing belongs to sigmoid")

    @property
    def per_token(self) -> bool:
        return self.kind == "ipo" if self.normalised is None else self.normalised

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        hidden_TD = model(batch.tokens_T, layout_of(batch), routing, runner)
        logprobs_T, _ = model.token_logprobs(hidden_TD, batch.targets_T)
        lengths = batch.lengths
        logprobs_S = torch.stack([part.sum() for part in logprobs_T.split(lengths)])
        tokens_S = torch.stack([part.sum() for part in (batch.targets_T != IGNORED).split(lengths)]).clamp(min=1)
        reference_S = of_sequences(batch.columns["reference"], lengths) if self.reference else None
        margin_P, weight_P = (of_sequences(batch.columns[name], lengths)[::2] for name in ("margin", "pair_weight"))
        rewards_S = self.rewards(logprobs_S, reference_S, tokens_S)
        lead_P = rewards_S[::2] - rewards_S[1::2]
        pair = (self.losses(lead_P - margin_P - self.margin) * weight_P).sum() / batch.count
        told = -(logprobs_S[::2] / tokens_S[::2]).sum() / batch.count
        total = pair + self.sft * told if self.sft else pair
        parts = {"pair": pair.detach()} | ({"sft": told.detach()} if self.sft else {})
        with torch.no_grad():
            means = {
                "pairs_right": (lead_P > 0).float(),
                "reward_margin": lead_P,
                "reward_chosen": rewards_S[::2],
                "reward_rejected": rewards_S[1::2],
                "logprob_chosen": logprobs_S[::2],
                "logprob_rejected": logprobs_S[1::2],
            }
            notes = {name: values_P.sum() / batch.count for name, values_P in means.items()}
        return Loss(total, parts, routing, notes)

    def rewards(self, logprobs_S: Tensor, reference_S: Tensor | None, tokens_S: Tensor) -> Tensor:
        """What the model itself holds each answer to be worth."""
        gain_S = logprobs_S if reference_S is None else logprobs_S - reference_S
        return self.beta * (gain_S / tokens_S if self.per_token else gain_S)

    def losses(self, lead_P: Tensor) -> Tensor:
        """Of each pair, by the chosen answer's reward less the rejected one's."""
        if self.kind == "ipo":  # the lead in log-probability should be 1 / (2 beta), no more and no less
            return (lead_P / self.beta - 1 / (2 * self.beta)).square()
        if self.kind == "hinge":
            return F.relu(1 - lead_P)
        return -(1 - self.smoothing) * F.logsigmoid(lead_P) - self.smoothing * F.logsigmoid(-lead_P)


def of_sequences(values_T: Tensor, lengths: list[int]) -> Tensor:
    """What stands at the first token of each sequence."""
    starts_S = torch.tensor(lengths, device=values_T.device).cumsum(0) - torch.tensor(lengths, device=values_T.device)
    return values_T[starts_S]
