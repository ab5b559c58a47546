"""Validation loss: the loss on held-out text, measured during a run: `loss/held_out` in metrics.jsonl.

    train: {evaluate_every: 100, evaluate_tokens: 65536}
    data: {held_out: 0.01}

The same text every time, sampled evenly from all of it, so that two values differ by the weights alone. Plain
next-token cross-entropy, without layer runners and whatever an objective adds.
"""

from __future__ import annotations

import torch

from moesaic.data.held_out import held_out_batches
from moesaic.data.shards import Shards
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.transformer import Model
from moesaic.train.objectives import layout_of

BATCH = 8192  # tokens of a forward pass


class HeldOutLoss:
    def __init__(
        self, data: Shards, *, tokens: int, sequence_length: int, device: torch.device, source: str | None = None
    ) -> None:
        size = min(BATCH, tokens)
        found = held_out_batches(
            data, batch_tokens=size, sequence_length=sequence_length, max_tokens=tokens, source=source
        )
        self.batches = [part for batch in found for part in batch.parts(1, device)]

    @torch.no_grad()
    def __call__(self, model: Model) -> float:
        total = count = 0.0
        for batch in self.batches:
            hidden_TD = model(batch.tokens_T, layout_of(batch))
            there_T = (batch.targets_T != IGNORED).float()
            loss, _ = model.ops.linear_cross_entropy(hidden_TD, model.output.detach(), batch.targets_T, there_T)
            total += float(loss)
            count += float(there_T.sum())
        return total / count
