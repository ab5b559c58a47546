"""Dynamic loss scaling for float16, which keeps small gradients from underflowing (Mixed Precision Training).

    scale = LossScale(device=model.device)
    scale.apply(loss).backward()
    result = optimizer.step(lr_factor, clip=1.0, loss_scale=scale.value)
    scale.update(result.skipped)

It doubles after a number of good steps and halves after an overflow, all on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moesaic.errors import UserError


class LossScale:
    """`value` is the factor: float32, of no dimensions, from `lowest` to `highest`, by doublings from `initial`."""

    def __init__(
        self,
        initial: float = 2.0**16,
        grow_after: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 < min_scale <= initial <= max_scale < float("inf"):
            raise ValueError(f"a loss scale of {initial:g} is not from {min_scale:g} to {max_scale:g}")
        if grow_after < 1:
            raise ValueError(f"a loss scale grows after at least 1 good step, not {grow_after}")
        self.grow_after, self.min_scale, self.max_scale = grow_after, min_scale, max_scale
        self.value = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)  # since the last change

    def apply(self, loss: Tensor) -> Tensor:
        """The loss to go backward from. Float32, where it cannot overflow."""
        return loss.float() * self.value

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """After a step: `skipped` says whether its gradients were not finite."""
        good = torch.where(skipped, 0, self.good_steps + 1)
        grow = good >= self.grow_after
        moved = torch.where(skipped, self.value * 0.5, torch.where(grow, self.value * 2.0, self.value))
        # At a bound the value stays: clamped, it might no longer be a power of two, and scaling would round.
        self.value.copy_(torch.where((moved < self.min_scale) | (moved > self.max_scale), self.value, moved))
        self.good_steps.copy_(good.masked_fill(grow, 0))

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        same = own.keys() == tensors.keys()
        if not same or any((tensors[key].shape, tensors[key].dtype) != ((), own[key].dtype) for key in own):
            raise UserError("loss scale state", f"must be {' and '.join(own)}", "Resume with the recipe that made it.")
        for key, tensor in own.items():
            tensor.copy_(tensors[key])
