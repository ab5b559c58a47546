"""First-order analysis of rounding (LLC, "Quantization in Layer's Input is Matter"): gradient times error, and how far
from the original weights that holds.

With the gradient g of the loss on real text, rounding errors e change the loss by g * e to first order: it may rise or
fall, so errors can be chosen that make the model better. That holds in a neighbourhood only: where the errors grow, the
curvature (`compress/sensitivity.py`) takes over. The neighbourhood is measured: the same errors are applied at a part
of their size, and the change that is predicted stands beside the one that is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

STEPS = (0.0625, 0.25, 1.0)  # of the errors' size
HOLDS = 0.5  # how far off a prediction may be, as a share of what is found


@dataclass(frozen=True)
class Step:
    """Errors of `size` times their own: what the loss was predicted to change by, and what it did."""

    size: float
    first: float
    second: float  # first order and curvature
    measured: float

    @property
    def first_order_holds(self) -> bool:
        return abs(self.first - self.measured) <= HOLDS * abs(self.measured)


class FirstOrder:
    """The loss's gradient at every matrix of a model, from the next tokens of a text."""

    def __init__(self, model: Model, names: list[str], sequences: list[list[int]]) -> None:
        self.model, self.sequences = model, sequences
        self._parameters = dict(model.named_parameters())
        for parameter in {_split(name)[0] for name in names}:
            self._parameters[parameter].requires_grad_(True)
        with torch.enable_grad():
            for nats in self._losses():
                (nats / self._predicted).backward()
        self._gradients: dict[str, Tensor] = {}
        for name in names:
            parameter, expert = _split(name)
            gradient = self._parameters[parameter].grad
            assert gradient is not None
            self._gradients[name] = gradient if expert is None else gradient[expert]
        model.requires_grad_(False)
        for parameter in {_split(name)[0] for name in names}:
            self._parameters[parameter].grad = None

    def change(self, name: str, error_OI: Tensor) -> float:
        """Of the loss, in nats a token."""
        return float((self._gradients[name] * error_OI).sum())

    @torch.no_grad()
    def loss(self) -> float:
        return float(sum(float(nats) for nats in self._losses()) / self._predicted)

    @torch.no_grad()
    def neighbourhood(
        self, errors: Mapping[str, Tensor], curvature: float, steps: tuple[float, ...] = STEPS
    ) -> list[Step]:
        """What happens as the errors grow to their own size; `curvature` is what they cost at it by second order."""
        before, first = self.loss(), sum(self.change(name, error_OI) for name, error_OI in errors.items())
        found = []
        for size in steps:
            self._move(errors, size)
            measured = self.loss() - before
            self._move(errors, -size)
            found.append(Step(size, first * size, first * size + curvature * size**2, measured))
        return found

    def _move(self, errors: Mapping[str, Tensor], size: float) -> None:
        for name, error_OI in errors.items():
            parameter, expert = _split(name)
            weights = self._parameters[parameter].data
            (weights if expert is None else weights[expert]).add_(error_OI, alpha=size)

    @property
    def _predicted(self) -> int:
        return sum(len(tokens) - 1 for tokens in self.sequences)

    def _losses(self) -> Iterator[Tensor]:
        for tokens in self.sequences:
            tokens_T = torch.tensor(tokens, device=self.model.device)
            hidden_TD = self.model(tokens_T[:-1], Layout([len(tokens) - 1], device=self.model.device))
            yield F.cross_entropy(self.model.logits_at(hidden_TD).float(), tokens_T[1:], reduction="sum")


def holds_to(steps: list[Step]) -> float:
    """The largest size up to which the first-order prediction held; 0 where it never did."""
    reach = 0.0
    for step in steps:
        if not step.first_order_holds:
            break
        reach = step.size
    return reach


def _split(name: str) -> tuple[str, int | None]:
    stem, _, leaf = name.rpartition(".")
    return (stem, int(leaf)) if leaf.isdigit() else (name, None)
