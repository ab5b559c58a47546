"""Intrinsic Sparse Structures (Wen et al. 2018): a group Lasso on hidden units while a model is trained.

    train: {constraint: {name: iss, keep: 0.5}}

A hidden unit of a feed-forward network is its row of the gate, its row of up and its column of down, and these are one
group: after every step of the optimizer each group gets shorter by the same length (the proximal step of the group
Lasso), so that units which the loss does not hold against it go to zero as wholes and what they did is learned by the
others. A layer, or an expert, that has no more units than are to stay is left alone. For the last `settle` of the steps
the penalty is off and the largest `keep` of the units stand, so the run ends with exactly so many. The shortening is
decoupled from the gradient as AdamW's weight decay is: with `penalty` 1 every weight of a group moves as far as Adam
would move it.

`moesaic compress DIR --method iss keep=0.5 score=magnitude refit=false` leaves the zeros out: the same outputs from
smaller, dense matrices. `penalty: 0` is pruning by size in the midst of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.config import Reading
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward
from moesaic.model.transformer import Model
from moesaic.train.constraints import Constraint, Unconstrained
from moesaic.train.optimizers import Optimizer, Slot

MULTIPLE = 8  # of units that are left


@dataclass(frozen=True)
class IntrinsicSparseStructures(Constraint):
    keep: float = 0.5  # share of the hidden units of every layer
    penalty: float = 0.3
    settle: float = 0.5  # share of the steps, the last, in which the choice stands

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise ValueError(f"keep must be a share between 0 and 1, not {self.keep}")
        if self.penalty < 0 or not 0 < self.settle <= 1:
            raise ValueError("penalty cannot be negative, and settle is above 0 and at most 1")

    def build(self, model: Model, optimizer: Optimizer, steps: int) -> Unconstrained:
        slots = {slot.name: slot for slot in optimizer.slots}
        return HeldUnits(self, list(networks(model, slots)), steps)


def units_left(hidden: int, keep: float) -> int:
    found = int(hidden * keep) // MULTIPLE * MULTIPLE
    if not found:
        raise UserError("keep", f"leaves none of {hidden} hidden units, of which {MULTIPLE} stay together")
    return found


class Network(NamedTuple):
    """A feed-forward network, or all experts of a layer, by its two matrices."""

    name: str
    gate_up: Slot
    down: Slot

    def lengths(self) -> Tensor:
        """Of every unit's group."""
        gate_up, down = self.gate_up.weight.detach(), self.down.weight.detach()
        halves = gate_up.unflatten(-2, (2, -1))
        return (halves.square().sum((-3, -1)) + down.square().sum(-2)).sqrt()

    def scale(self, by_F: Tensor) -> None:
        self.gate_up.write(self.gate_up.weight.detach() * torch.cat([by_F, by_F], -1)[..., None])
        self.down.write(self.down.weight.detach() * by_F[..., None, :])


def networks(model: Model, slots: dict[str, Slot]) -> Iterator[Network]:
    for number, block in enumerate(model.layers):
        name, ffn = f"layers.{number}.ffn", block.ffn
        if isinstance(model.config.layers[number].ffn, Reading):
            continue
        if isinstance(ffn, DenseFeedForward) and ffn.gate_up.bias is None:
            names = (f"{name}.gate_up.weight", f"{name}.down.weight")
        elif isinstance(ffn, MixtureFeedForward) and ffn.bias_EG is None:
            names = (f"{name}.gate_up_EGD", f"{name}.down_EDF")
        else:
            raise UserError("train.constraint", "iss takes gated networks without biases", "Leave it out.")
        if missing := [one for one in names if one not in slots]:
            raise UserError("train.constraint", f"{missing[0]} is not trained", "Train all weights, or leave iss out.")
        yield Network(name, *(slots[one] for one in names))


class HeldUnits(Unconstrained):
    """Units that get shorter, then those that stay."""

    def __init__(self, options: IntrinsicSparseStructures, held: list[Network], steps: int) -> None:
        self.options, self.held = options, held
        self.settles = steps - round(steps * options.settle)  # after this step
        self.counts = {part.name: units_left(part.lengths().shape[-1], options.keep) for part in held}
        self.kept: dict[str, Tensor] = {}
        self._gap = torch.zeros(())
        if self.settles == 0:
            self._settle()

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> bool:
        settles = not self.kept and step >= self.settles
        if not self.kept:
            self._shorten(lr)
        if settles:
            self._settle()
        for part in self.held if self.kept else []:
            part.scale(self.kept[part.name])
        return settles

    def _shorten(self, lr: float) -> None:
        gone, whole = [], []
        for part in self.held:
            length_F = part.lengths()
            group = 2 * part.gate_up.weight.shape[-1] + part.down.weight.shape[-2]
            by_F = (1 - lr * self.options.penalty * group**0.5 / length_F.clamp(min=1e-20)).clamp(min=0)
            enough = (length_F > 0).sum(-1, keepdim=True) <= self.counts[part.name]
            part.scale(by_F.where(~enough, 1.0))
            left_F = (length_F * by_F).sort(-1, descending=True).values.square()
            gone.append(left_F[..., self.counts[part.name] :].sum())
            whole.append(left_F.sum())
        self._gap = (torch.stack(gone).sum() / torch.stack(whole).sum().clamp(min=1e-20)).sqrt()

    def _settle(self) -> None:
        for part in self.held:
            length_F = part.lengths()
            best = length_F.topk(self.counts[part.name], dim=-1).indices
            self.kept[part.name] = torch.zeros_like(length_F).scatter_(-1, best, 1.0)

    def notes(self) -> dict[str, Tensor]:
        """The length of the units that will have to go, as a share of all; zero once the choice stands."""
        return {"constraint/gap": torch.zeros_like(self._gap) if self.kept else self._gap}

    def state(self) -> dict[str, Tensor]:
        return {"gap": self._gap, **{f"{name}/kept": kept.to(torch.uint8) for name, kept in self.kept.items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        device = self.held[0].down.weight.device
        self._gap = tensors["gap"]
        named = {key.removesuffix("/kept"): kept for key, kept in tensors.items() if key.endswith("/kept")}
        self.kept = {name: kept.to(device).float() for name, kept in named.items()}
