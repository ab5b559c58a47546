"""Where a number that is not finite came from, when a step had to be skipped: which rank, and which parameter.

Looked for only then. A loss is a rank's own, so one that is not finite names the rank. Gradients are summed over ranks
by the time they are looked at: which rank's part was bad can no longer be seen, except for experts, whose rank is their
own. The parameter named is the first that the backward pass came to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.sharded import local


@dataclass
class Gradients:
    """Of one step: their norm over all ranks, and of which parameters they are finite here."""

    step: int
    norm: Tensor
    names: list[str]
    finite_P: Tensor | None  # None: not looked at, since the norm is finite
    loss: Tensor | None  # this rank's own


def look(model: nn.Module, norm: Tensor, step: int, loss: Tensor | None) -> Gradients:
    """Before the optimizer uses gradients up. On a GPU nothing is read: one more pass over the gradients costs less
    than to wait for it."""
    if norm.device.type == "cpu" and bool(norm.isfinite()):
        return Gradients(step, norm, [], None, loss)
    every = ((name, local(p.grad)) for name, p in model.named_parameters() if p.grad is not None)
    named = [(name, grad) for name, grad in every if grad.numel()]
    finite = [found.isfinite() for found in torch._foreach_norm([grad for _, grad in named], float("inf"))]
    return Gradients(step, norm, [name for name, _ in named], torch.stack(finite) if finite else None, loss)


def own_word(found: Gradients, model: nn.Module) -> dict[str, Any]:
    """What this rank has to say of a skipped step."""
    good = found.finite_P.tolist() if found.finite_P is not None else []
    bad = [name for name, fine in zip(found.names, good, strict=True) if not fine]
    weights = (name for name, p in model.named_parameters() if not bool(local(p.detach()).isfinite().all()))
    return {
        "loss": found.loss is None or bool(found.loss.isfinite()),
        "weights": next(weights, None),
        "parameter": bad[-1] if bad else None,  # the backward pass goes from the last to the first
        "count": len(bad),
    }


def explain(words: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """All ranks' words in one, and the facts of it."""
    weights = [(rank, word["weights"]) for rank, word in enumerate(words) if word["weights"]]
    losses = [rank for rank, word in enumerate(words) if not word["loss"]]
    gradients = [(rank, word["parameter"], word["count"]) for rank, word in enumerate(words) if word["parameter"]]
    parts = []
    if weights:
        parts.append(f"on rank {weights[0][0]} the weights of {weights[0][1]} are not finite")
    if losses:
        parts.append(f"the loss of rank{'s' if len(losses) > 1 else ''} {', '.join(map(str, losses))} is not finite")
    if gradients:
        where, name, count = max(gradients, key=lambda one: one[2])
        parts.append(f"gradients are not finite first in {name} (rank {where}, {count} parameters there)")
    first = weights[0] if weights else (gradients[0][:2] if gradients else (losses[0] if losses else None, None))
    rank = losses[0] if losses and not weights else first[0]
    return "; ".join(parts) or "only the sum over ranks is not finite", {"rank": rank, "parameter": first[1]}
