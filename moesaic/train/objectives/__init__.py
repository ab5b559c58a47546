"""What is trained: an objective turns a model and a batch into a loss. Each is one file, found by its name.

A batch may come in parts. Its `count` is the number of targets in the whole of it: losses are sums divided by that, so
that the gradients of the parts add up to that of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.data.given_rows import GIVEN, ROWS
from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.model.config import ModelConfig
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import LayerRunner, Model, run_plainly


@dataclass
class Loss:
    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)  # detached, for the record: written as loss/NAME
    routing: Routing = field(default_factory=Routing)
    notes: dict[str, Tensor] = field(default_factory=dict)  # written as they are; of NAME_max the largest, else the sum


@dataclass(frozen=True)
class Objective:
    of_text: ClassVar[bool] = (
        True  # whether text alone is enough for it; answers and rewards come from a stage of align
    )

    takes_rows: ClassVar[bool] = False  # whether rows may stand in place of tokens (`data/given_rows.py`)

    def check(self) -> None:
        """Whether what it needs is there, before anything is made."""

    def check_model(self, config: ModelConfig) -> None:
        """Whether it can train a model of this config, before anything is made."""

    def special_tokens(self) -> dict[str, str]:
        """Option -> the token that must be one of the tokenizer's."""
        return {}

    def prepare(self, model: Model) -> None:
        """Called once before training, with the model it will be used on."""

    def begin_step(self, step: int, steps: int) -> None:
        """Called before each of a run's steps, counted from 0, for what changes as it goes."""

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        raise NotImplementedError


def layout_of(batch: Batch) -> Layout:
    return Layout(batch.lengths, device=batch.tokens_T.device)


def inputs_of(model: Model, batch: Batch) -> Tensor:
    """A batch's tokens; or where rows are given in place of some, what the model is to read: those, and embeddings."""
    if GIVEN not in batch.columns:
        return batch.tokens_T
    rows_TD, x_TD = batch.columns[ROWS], model.embedded(batch.tokens_T)
    if rows_TD.shape[1] != x_TD.shape[1]:
        problem = f"have {rows_TD.shape[1]} numbers each, and the model's hidden states {x_TD.shape[1]}"
        raise UserError("rows in place of tokens", problem, "Give rows that were made for this model.")
    return torch.where(batch.columns[GIVEN][:, None], rows_TD.to(x_TD.dtype), x_TD)


def shifted(values_T: Tensor, lengths: list[int], by: int, fill: int) -> Tensor:
    """Each sequence moved `by` places to the left, `fill` behind its end."""
    out_T = torch.full_like(values_T, fill)
    start = 0
    for length in lengths:
        if length > by:
            out_T[start : start + length - by] = values_T[start + by : start + length]
        start += length
    return out_T
