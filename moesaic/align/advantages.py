"""Advantages: how much better than expected each completion was.

All take rewards (prompts, completions of each) and return advantages of the same shape. What a completion's reward is,
where there are several, is said by `normalised_each`, or is their plain sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = 1e-6
SAME = 1e-12  # a spread below this share of the mean is rounding


def group_relative(rewards_QG: Tensor) -> Tensor:
    """GRPO (DeepSeekMath): against the other completions of the same prompt, in units of their spread."""
    centred_QG = rewards_QG - rewards_QG.mean(1, keepdim=True)
    return centred_QG / (rewards_QG.std(1, keepdim=True, correction=0) + TINY)


def group_centred(rewards_QG: Tensor) -> Tensor:
    """Dr. GRPO: without the division, which favours prompts that are nearly always or nearly never solved."""
    return rewards_QG - rewards_QG.mean(1, keepdim=True)


def leave_one_out(rewards_QG: Tensor) -> Tensor:
    """RLOO: against the mean of the other completions, which the completion itself has no part in."""
    others = rewards_QG.shape[1] - 1
    return rewards_QG - (rewards_QG.sum(1, keepdim=True) - rewards_QG) / max(others, 1)


def batch_normalised(rewards_QG: Tensor) -> Tensor:
    """REINFORCE++ with baseline: the prompt's mean taken off, in units of the spread over the whole batch."""
    centred_QG = rewards_QG - rewards_QG.mean(1, keepdim=True)
    return centred_QG / (centred_QG.std(correction=0) + TINY)


def normalised_each(parts_QGR: Tensor, weights_R: Tensor) -> Tensor:
    """The weighted sum of several rewards, each first brought to mean 0 and spread 1 within its group (GDPO, AeSlides):
    then a reward counts by its weight, and not by the scale it happens to have.

    One that was not given (nan) counts as its group's mean; one that is the same for all of a group says nothing there.
    """
    mean_Q1R = parts_QGR.nanmean(1, keepdim=True)
    centred_QGR = (parts_QGR - mean_Q1R).nan_to_num(0.0)
    given_Q1R = parts_QGR.isfinite().sum(1, keepdim=True).clamp(min=1)
    spread_Q1R = (centred_QGR.square().sum(1, keepdim=True) / given_Q1R).sqrt()
    # What is left of equal numbers, whose mean may be another in the last bit, is no spread.
    real_Q1R = spread_Q1R > SAME * mean_Q1R.abs().nan_to_num(0.0)
    unit_QGR = torch.where(real_Q1R, centred_QGR / torch.where(real_Q1R, spread_Q1R, 1.0), 0.0)
    return (unit_QGR * weights_R).sum(2)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "group_relative": group_relative,
    "group_centred": group_centred,
    "leave_one_out": leave_one_out,
    "batch_normalised": batch_normalised,
}


def generalised_advantages(
    rewards_T: Tensor, values_T: Tensor, discount: float = 1.0, decay: float = 0.95
) -> tuple[Tensor, Tensor]:
    """GAE, for a policy with a critic: advantages and returns of one completion's tokens.

    `values_T[i]` is what the critic expected before token i; nothing is expected behind the last.
    """
    # Plain numbers: a loop over tensors of one element takes fifty times as long.
    rewards, values = rewards_T.tolist(), [*values_T.tolist(), 0.0]
    found = [0.0] * len(rewards)
    ahead = 0.0
    for place in range(len(rewards) - 1, -1, -1):
        surprise = rewards[place] + discount * values[place + 1] - values[place]
        ahead = surprise + discount * decay * ahead
        found[place] = ahead
    advantages_T = torch.tensor(found, dtype=rewards_T.dtype, device=rewards_T.device)
    return advantages_T, advantages_T + values_T
