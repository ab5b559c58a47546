"""Adam with decoupled weight decay (Decoupled Weight Decay Regularization): PyTorch's fused kernel, ours on a GPU.

    moesaic train recipes/tiny.yaml --out out/run "optimizer={name: adamw, lr: 3e-4, betas: [0.9, 0.95]}"

On a CPU the bits are those of `torch.optim.AdamW(fused=True)` wherever that works on whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moesaic.train.optimizers import Named, OptimizerMethod, Rule, Slot, Step, by_decay, need

VECTOR = 64  # numbers; as many as the widest vectors hold of the smallest format, or more


@dataclass(frozen=True)
class AdamW(OptimizerMethod):
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    decay_embeddings: bool = True

    def __post_init__(self) -> None:
        check_adam(self.lr, self.betas, self.eps, self.weight_decay)

    def groups(self, parameters: list[Named]) -> list[tuple[Rule, list[Named]]]:
        return [
            (AdamWRule(self.lr, self.betas, self.eps, decay), group)
            for decay, group in by_decay(parameters, self.weight_decay, self.decay_embeddings)
        ]


@dataclass(frozen=True)
class AdamWRule(Rule):
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }

    def update(self, slots: Sequence[Slot], gradients: Sequence[Tensor], step: Step) -> None:
        if slots and slots[0].weight.is_cuda:  # half again as fast as the library's
            from moesaic.kernels.triton import adamw as kernel

            kernel.adamw(
                [slot.weight for slot in slots],
                gradients,
                *([slot.state[name] for slot in slots] for name in ("exp_avg", "exp_avg_sq", "step")),
                lr=self.lr * step.lr_factor,
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                weight_decay=self.weight_decay,
                divisor=step.divisor,
                skip=step.skip.float(),
            )
            return
        columns = [
            [slot.weight for slot in slots],
            list(gradients),
            *([slot.state[name] for slot in slots] for name in ("exp_avg", "exp_avg_sq", "step")),
        ]
        padded = whole_vectors(columns)
        weights, gradients, exp_avgs, exp_avg_sqs, steps = columns
        adamw(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=True,
            grad_scale=step.divisor,
            found_inf=step.skip.float(),
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr * step.lr_factor,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )
        for part, copy in padded:
            part.copy_(copy[: part.numel()])


def whole_vectors(columns: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Add to these columns (weights, gradients, states, steps) what is left of each tensor behind its last whole
    vector, padded to one, in place of the tensor's own end. Returned: those ends, and the copies that will hold their
    values.

    The library rounds the numbers behind the last whole vector otherwise than those before. Where that is depends on
    how a tensor is sharded, and a run on ranks must have the bits of one process.
    """
    ends: list[tuple[Tensor, Tensor]] = []
    for row in range(len(columns[0])):
        weight = columns[0][row]
        end = weight.numel() % VECTOR
        if not end or not all(column[row].is_contiguous() for column in columns[:-1]):
            continue
        for column in columns[:-1]:
            flat = column[row].view(-1)
            copy = flat.new_zeros(VECTOR)
            copy[:end] = flat[-end:]
            ends.append((flat[-end:], copy))
            column[row] = flat[:-end]
            column.append(copy)
        columns[-1].append(columns[-1][row].clone())
    return ends


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse options no Adam can have; each method that has an Adam in it asks."""
    need(0 < lr <= 1000, f"lr must be above 0 and at most 1000, found {lr:g}")
    need(all(0 <= beta < 1 for beta in betas), f"betas must be from 0 to below 1, found {list(betas)}")
    need(0 < eps <= 1, f"eps must be above 0 and at most 1, found {eps:g}")
    need(0 <= weight_decay <= 1000, f"weight_decay must be from 0 to 1000, found {weight_decay:g}")
