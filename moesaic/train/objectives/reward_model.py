"""Tell the better of two answers by a number for each (Bradley-Terry), and right steps from wrong ones.

    objective: {stability: 0.01}

The stability term is ChatGLM-RLHF's: squares of the rewards, so that they stay near zero and mean the same throughout
a run. Steps are judged by the logit of being right ("Let's Verify Step by Step").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from moesaic.data.packing import Batch
from moesaic.model.context import Routing
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective, layout_of


@dataclass(frozen=True)
class RewardModel(Objective):
    of_text: ClassVar[bool] = False

    stability: float = 0.0
    margin: float = 0.0  # by how much the chosen answer should get more; a pair's own margin is added

    def __post_init__(self) -> None:
        if self.stability < 0 or self.margin < 0:
            raise ValueError("stability and margin cannot be negative")

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        assert model.value is not None, "a reward model has a value head"
        columns = batch.columns
        values_T = model.value(model(batch.tokens_T, layout_of(batch), routing, runner))
        first_T, second_T, step_T = columns["side"] > 0, columns["side"] < 0, columns["label"] >= 0
        chosen_P, rejected_P, share_P = values_T[first_T], values_T[second_T], columns["share"][first_T]
        lead_P = chosen_P - rejected_P
        losses_P = -F.logsigmoid(lead_P - columns["margin"][first_T] - self.margin) * columns["pair_weight"][first_T]
        total = pair = (losses_P * share_P).sum()
        parts = {"pair": pair.detach()} if first_T.any() else {}
        if self.stability:
            stable = ((chosen_P.square() + rejected_P.square()) * share_P).sum()
            parts["stability"] = stable.detach()
            total = total + self.stability * stable
        logits_N, labels_N, share_N = values_T[step_T], columns["label"][step_T], columns["share"][step_T]
        if len(logits_N):
            steps = (F.binary_cross_entropy_with_logits(logits_N, labels_N, reduction="none") * share_N).sum()
            parts["steps"] = steps.detach()
            total = total + steps
        with torch.no_grad():
            means = {
                "pairs_right": (lead_P > 0).float(),
                "reward_margin": lead_P,
                "reward_chosen": chosen_P,
                "reward_rejected": rejected_P,
            }
            notes = {name: (values_P * share_P).sum() for name, values_P in means.items() if len(lead_P)}
            if len(logits_N):
                notes["steps_right"] = (((logits_N > 0) == (labels_N > 0.5)) * share_N).sum()
        return Loss(total, parts, routing, notes)
