"""What the stages of a pipeline found, put together on all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.parallel.messages import collect


def over_stages(
    found: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Tensor]:
    """Sums over the ranks of `group`, and of NAME_max the largest; ranks may have found different things. What one
    rank alone found keeps its bits."""
    named: list[list[str]] = collect(list(found), group)
    names = list(dict.fromkeys(name for some in reversed(named) for name in some))  # the last stage's first
    if not names:
        return {}
    none = torch.zeros((), device=device)
    mine_N = torch.stack([found.get(name, none).detach().float() for name in names])
    of_ranks = [torch.empty_like(mine_N) for _ in named]
    dist.all_gather(of_ranks, mine_N, group)
    all_RN = torch.stack(of_ranks)
    sums_N, largest_N = all_RN.sum(0), all_RN.amax(0)
    return {name: (largest_N if name.endswith("_max") else sums_N)[at] for at, name in enumerate(names)}
