"""Matrices that lie otherwise on disk than in the model: experts with inputs before outputs or rows of gate and up in
turns, and rows that lie head by head.

A family says so by how the names of its tensors end (`TURNED`, or `turned` where it depends on sizes in config.json);
to everybody else its checkpoints are like others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.model.families import family_for, known
from moesaic.model.families.traits import Turned
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.formats.tensor_file import Part

PLAIN = Turned(inputs_first=False)


def turned_in(raw: dict[str, Any], name: str) -> Turned:
    """How a tensor lies in a checkpoint with this config.json."""
    kind = raw.get("model_type")
    if kind not in known():
        return PLAIN
    family = family_for(kind, "config")
    endings = family.turned(raw) if hasattr(family, "turned") else getattr(family, "TURNED", {})
    return next((turned for ending, turned in endings.items() if name.endswith(ending)), PLAIN)


def turns(family: str) -> bool:
    """Whether any of its matrices lies otherwise on disk."""
    module = family_for(family, "config")
    return hasattr(module, "TURNED") or hasattr(module, "turned")


def shape_on_disk(turned: Turned, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if turned.inputs_first else shape


def to_disk(turned: Turned, tensor: Tensor) -> Tensor:
    """Of all experts the first dimension is theirs."""
    if turned.by_head:
        return _regrouped(tensor, turned.by_head, to_heads=True)
    if turned.alternating:
        tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return tensor.transpose(-1, -2) if turned.inputs_first else tensor


def from_disk(turned: Turned, tensor: Tensor) -> Tensor:
    if turned.by_head:
        return _regrouped(tensor, turned.by_head, to_heads=False)
    tensor = tensor.transpose(-1, -2) if turned.inputs_first else tensor
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if turned.alternating else tensor


def _regrouped(rows: Tensor, sizes: tuple[int, ...], to_heads: bool) -> Tensor:
    heads = len(rows) // sum(sizes)
    if to_heads:
        kinds = rows.split([heads * size for size in sizes])
        return torch.cat([kind.unflatten(0, (heads, -1)) for kind in kinds], dim=1).flatten(0, 1)
    return torch.cat([kind.flatten(0, 1) for kind in rows.unflatten(0, (heads, -1)).split(sizes, dim=1)])


class TurnedCheckpoint(Checkpoint):
    """A directory whose tensors are shown as the model has them. Of one expert, no more than that is read."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape_on_disk(self._turned(name), shape) for name, shape in super().shapes().items()}

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        turned = self._turned(name)
        if turned == PLAIN:
            return super().tensor(name, part)
        if turned.by_head:
            found = from_disk(turned, super().tensor(name))
            return found[part].contiguous() if part else found
        first, rest = part[:1], part[1:]
        if first and isinstance(first[0], int):
            found = from_disk(turned, super().tensor(name, first)[None])[0]
        else:
            found = from_disk(turned, super().tensor(name, first))
            rest = (slice(None), *rest) if rest else ()
        return (found[rest] if rest else found).contiguous()

    def read_into(self, out: Tensor, name: str, part: Part = ()) -> None:
        if self._turned(name) == PLAIN:
            super().read_into(out, name, part)
        else:
            out.copy_(self.tensor(name, part))

    def _turned(self, name: str) -> Turned:
        return turned_in(self.config, name)
