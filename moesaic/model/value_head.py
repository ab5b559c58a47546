"""A value head: one number for every token, on the hidden states of the very model that speaks (reward model, critic).

It lies beside the weights as `value_head.safetensors`, so the directory stays a checkpoint that `transformers` loads:
whoever wants only the language model does not see it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.model.formats.tensor_file import TensorFile

if TYPE_CHECKING:
    from moesaic.model.transformer import Model

FILE = "value_head.safetensors"
PREFIX = "value."  # of its parameters in the model


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
