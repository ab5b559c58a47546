"""Ranks whose engines complete different prompts, with layers that they compute together.

Experts that lie on other ranks, and weights that are gathered layer by layer (zero=3), want every rank in every
forward, and how many forwards a rank's own completions take nobody knows before. So ranks meet before each: whoever
has one says so, and a rank that has none left takes part with a token that nobody asked for, until all are through.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moesaic.kernels.interface import Batch, Kernels
from moesaic.kernels.wrapped import WrappedKernels, for_batch
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model


class TurnKernels(WrappedKernels):
    """The model's kernels while its engine is one of several: a forward begins when all ranks begin one."""

    def __init__(self, plain: Kernels, group: dist.ProcessGroup) -> None:
        super().__init__(plain)
        self.group = group

    def for_batch(self, layout: Batch, rows: int | None = None) -> Any:
        self.anyone(True)
        return for_batch(self.plain, layout, rows)

    def anyone(self, has_one: bool) -> bool:
        """Whether any rank has a forward to compute."""
        said = torch.tensor([has_one], dtype=torch.int32)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        return bool(said)

    @torch.inference_mode()
    def keep_company(self, model: Model) -> None:
        """Take part in the others' forwards until they have no more."""
        while self.anyone(False):
            run_one_token(model, self.plain)


def run_one_token(model: Model, ops: Kernels | None = None) -> None:
    """Through all layers, for the sake of the other ranks."""
    x_TD, context = model.begin(torch.zeros(1, dtype=torch.int64, device=model.device), _one(model), ops=ops)
    model.run_layers(x_TD, context)


def gather_weights(model: Model) -> None:
    """Run the whole model, so that whatever stays gathered after a forward is there, embedding and head at least.
    Not in inference mode: the tensors that this makes are learned with later."""
    with torch.no_grad():
        model(torch.zeros(1, dtype=torch.int64, device=model.device), _one(model))


def _one(model: Model) -> Layout:
    return Layout([1], device=model.device)
