"""Predict the next token; with multi-token-prediction layers also the ones after it (DeepSeek-V3, GLM-4.5).

train: {objective: {name: next_token, mtp_weight: 0.3}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from moesaic.data.packing import Batch
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.context import Routing
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective, inputs_of, layout_of, shifted


@dataclass(frozen=True)
class NextToken(Objective):
    mtp_weight: float = 0.3  # of the mean loss of the prediction layers
    logit_cap: float = 0.0  # bends logits to within ±cap: Kaiyuan's guard for float16
    takes_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mtp_weight < 0 or self.logit_cap < 0:
            raise ValueError("mtp_weight and logit_cap cannot be negative")

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        layout, targets_T, inputs = layout_of(batch), batch.targets_T, inputs_of(model, batch)
        hidden_TD = model(inputs, layout, routing, runner)
        scale_T = torch.full(targets_T.shape, 1.0 / max(batch.count, 1), device=targets_T.device)
        total, _ = model.cross_entropy(hidden_TD, targets_T, scale_T, cap=self.logit_cap)
        parts = {"next": total.detach()}
        for number in range(len(model.mtp)):
            # Behind token i: the layer reads token i+1+number, and should say token i+2+number.
            next_T = shifted(inputs, batch.lengths, 1 + number, 0)
            further_T = shifted(targets_T, batch.lengths, 1 + number, IGNORED)
            hidden_TD = model.predict_further(number, hidden_TD, next_T, layout, routing)
            loss, _ = model.cross_entropy(hidden_TD, further_T, scale_T, cap=self.logit_cap)
            parts[f"mtp{number + 1}"] = loss.detach()
            total = total + loss * (self.mtp_weight / len(model.mtp))
        return Loss(total, parts, routing)
