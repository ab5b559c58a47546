"""A value head: one number for every token, on the hidden states of the very model that speaks (reward model, critic).

It lies beside the weights as `value_head.safetensors`, so the directory stays a checkpoint that `transformers` loads:
whoever wants only the language model does not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.model.formats.tensor_file import TensorFile
from moesaic.model.layout import Layout

if TYPE_CHECKING:
    from moesaic.model.transformer import Model

FILE = "value_head.safetensors"
PREFIX = "value."  # of its parameters in the model
TOKENS = 8192  # of a forward


class ValueHead(nn.Module):
    """Begins at zero: every answer is worth the same, every future expected to bring nothing."""

    def __init__(self, hidden: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        # Float32 whatever the model is: a few thousand numbers, and rewards are differences of near-equal sums.
        self.weight = nn.Parameter(torch.zeros(1, hidden, device=device, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=torch.float32))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        value_T1: Tensor = nn.functional.linear(hidden_TD.float(), self.weight, self.bias)
        return value_T1.squeeze(1)


def give_head(model: Model) -> ValueHead:
    """The model's head; a fresh one if it has none."""
    if model.value is None:
        model.value = ValueHead(model.config.hidden, model.device)
    return model.value


@torch.no_grad()
def values_at(model: Model, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The value head's numbers at some tokens of each sequence, many sequences to a forward."""
    assert model.value is not None
    found: list[Tensor] = []
    start = 0
    while start < len(sequences):
        stop, tokens = start, 0
        while stop < len(sequences) and (stop == start or tokens + len(sequences[stop]) <= TOKENS):
            tokens += len(sequences[stop])
            stop += 1
        some = sequences[start:stop]
        layout = Layout([len(one) for one in some], device=model.device)
        tokens_T = torch.tensor([token for one in some for token in one], device=model.device)
        values_T = model.value(model(tokens_T, layout)).cpu()
        found += [values[list(at)] for values, at in zip(values_T.split([len(one) for one in some]), rows[start:stop])]
        start = stop
    return found


def has_head(directory: Path) -> bool:
    return (directory / FILE).is_file()


def require_head(directory: Path) -> None:
    if not has_head(directory):
        problem = f"has no value head ({FILE})"
        raise UserError(directory, problem, "Name the directory that a reward_model stage made.")


def read_head(directory: Path, hidden: int, device: torch.device | str) -> ValueHead | None:
    """None where the directory is of a plain language model."""
    if not has_head(directory):
        return None
    file = TensorFile(directory / FILE)
    shapes = {name: stored.shape for name, stored in file.tensors.items()}
    if shapes != {"weight": (1, hidden), "bias": (1,)}:
        problem = f"does not hold weight 1x{hidden} and bias 1"
        raise UserError(directory / FILE, problem, "It does not belong to this model; train or copy it again.")
    head = ValueHead(hidden, device)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(file.tensor(name))
    return head


def write_head(directory: Path, state: dict[str, Tensor]) -> None:
    """The head among a model's tensors, if there is one, into a directory that is being made."""
    found = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    if found:
        plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in found.items()}
        (directory / FILE).write_bytes(save(plain))


def copy_head(source: Path, directory: Path) -> None:
    """The head beside other weights, if there is one, into a directory that is being made of them."""
    if has_head(source):
        (directory / FILE).write_bytes((source / FILE).read_bytes())
