"""Momentum made orthogonal, for hidden matrices (Muon; Muon is Scalable for LLM Training), and AdamW for the rest.

    moesaic train recipes/tiny.yaml --out out/run "optimizer={name: muon, lr: 3e-4}"

The experts of a layer are a stack of matrices, and each is made orthogonal by itself. Embedding, head, routers, norms
and biases go by AdamW. With `adjust: match_rms_adamw` an update is as large as AdamW's would be, so both go by one
learning rate; with `original` (the first Muon's) give `lr` about 0.02 and AdamW its own `adamw_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moesaic.sharded import gathered, local, own_rows
from moesaic.train.optimizers import Named, OptimizerMethod, Rule, Slot, Step, need, role
from moesaic.train.optimizers.adamw import AdamW, check_adam

Precision = Literal["auto", "bfloat16", "float32"]
Adjust = Literal["original", "match_rms_adamw"]

# The momenta of so many elements are made orthogonal at a time, to bound the memory of the iteration.
PIECE = 2**26


@dataclass(frozen=True)
class Muon(OptimizerMethod):
    lr: float = 3e-4
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    adjust: Adjust = "match_rms_adamw"
    iterations: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    precision: Precision = "auto"  # of the iteration: bfloat16 on a GPU, float32 on a CPU
    adamw_lr: float | None = None  # none given: as `lr`
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float | None = None  # none given: as `weight_decay`
    decay_embeddings: bool = True

    def __post_init__(self) -> None:
        check_adam(self.lr, (0.0, 0.0), self.eps, self.weight_decay)
        need(0 <= self.momentum < 1, f"momentum must be from 0 to below 1, found {self.momentum:g}")
        need(1 <= self.iterations < 100, f"iterations must be from 1 to 99, found {self.iterations}")
        self.adamw()

    def adamw(self) -> AdamW:
        return AdamW(
            self.lr if self.adamw_lr is None else self.adamw_lr,
            self.adamw_betas,
            self.adamw_eps,
            self.weight_decay if self.adamw_weight_decay is None else self.adamw_weight_decay,
            self.decay_embeddings,
        )

    def groups(self, parameters: list[Named]) -> list[tuple[Rule, list[Named]]]:
        hidden = [(name, parameter) for name, parameter in parameters if role(name, parameter) == "hidden"]
        others = [(name, parameter) for name, parameter in parameters if role(name, parameter) != "hidden"]
        return [(MuonRule(self), hidden), *self.adamw().groups(others)]


@dataclass(frozen=True)
class MuonRule(Rule):
    options: Muon

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(weight)}

    def update(self, slots: Sequence[Slot], gradients: Sequence[Tensor], step: Step) -> None:
        for slot, gradient in zip(slots, gradients, strict=True):
            if gradient.dim() == 2 and local(slot.parameter) is not slot.parameter:  # a matrix is orthogonal as a whole
                self._update_divided(slot, gradient, step)
                continue
            for piece in _pieces(gradient):
                self._update(slot.weight[piece], slot.state["momentum"][piece], gradient[piece], step)

    def _update_divided(self, slot: Slot, gradient: Tensor, step: Step) -> None:
        """Of a matrix whose rows lie on several ranks: each works on the whole, and keeps its rows."""
        held = (slot.weight, slot.state["momentum"])
        weight, momentum = (gathered(tensor, slot.parameter) for tensor in held)
        self._update(weight, momentum, gathered(gradient, slot.parameter), step)
        for own, updated in zip(held, (weight, momentum), strict=True):
            own.copy_(own_rows(updated, slot.parameter))

    def _update(self, weight: Tensor, momentum: Tensor, gradient: Tensor, step: Step) -> None:
        options, lr = self.options, self.options.lr * step.lr_factor
        gradient = gradient / step.divisor
        moved = momentum.lerp(gradient, 1 - options.momentum)
        step.keep(momentum, moved)
        direction = gradient.lerp(moved, options.momentum) if options.nesterov else moved
        direction = orthogonal(direction, options.coefficients, options.iterations, options.eps, options.precision)
        new = weight * (1 - lr * options.weight_decay)
        new.add_(direction, alpha=-lr * adjustment(options.adjust, *weight.shape[-2:]))
        step.keep(weight, new)


def orthogonal(
    matrices: Tensor,
    coefficients: tuple[float, float, float],
    iterations: int,
    eps: float,
    precision: Precision = "auto",
) -> Tensor:
    """Each matrix with its singular values brought near to one, by a quintic Newton-Schulz iteration.

    The usual coefficients trade precision for speed: singular values end between about 0.7 and 1.2.
    """
    a, b, c = coefficients
    if precision == "auto":
        # Where a CPU has no bfloat16 unit its products are hundreds of times slower than float32 ones.
        precision = "float32" if matrices.device.type == "cpu" else "bfloat16"
    x = matrices.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # the products are then of the smaller size
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x.mT if tall else x


def adjustment(kind: Adjust, rows: int, columns: int) -> float:
    """By what an orthogonal update of a matrix is scaled, so that one learning rate suits every shape."""
    if kind == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _pieces(matrices: Tensor) -> Iterator[slice]:
    """Parts of the first dimension of a stack to be worked on together; a single matrix is not parted."""
    count = len(matrices)
    together = count if matrices.dim() == 2 else max(1, PIECE // matrices[0].numel())
    for begin in range(0, count, together):
        yield slice(begin, begin + together)
