"""Advantages: how much better than expected each completion was.

All take rewards (prompts, completions of each) and return advantages of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = 1e-6


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
