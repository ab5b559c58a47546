"""What a method is given: the model to be made smaller, tensor by tensor, the text to read, and where results go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moesaic import kernels
from moesaic.compress.layer_store import LayerStore
from moesaic.errors import UserError
from moesaic.model.config import ModelConfig
from moesaic.model.directory import Parts
from moesaic.model.families import Place, family_for, write_config
from moesaic.model.families.places import by_parameter

CPU = torch.device("cpu")
Progress = Callable[[str, int, int], None]


@dataclass
class Job:
    parts: Parts
    source: Path
    store: LayerStore
    sequences: list[list[int]] = field(default_factory=list)
    ends_bits: int = 8  # of the embedding and the output matrix; 0: as they are
    min_expert_tokens: int = 64  # tokens that every expert sees
    whole_zeros: bool = False  # the layout has no fractions of a code
    progress: Progress = lambda what, done, total: None
    device: torch.device = CPU  # where layers are worked on, one at a time

    @property
    def mode(self) -> kernels.Mode:
        """Of the kernels: here all is float32, of which on a GPU the library makes most."""
        return "fast" if self.device.type == "cpu" else "reference"

    @property
    def kernels(self) -> kernels.Kernels:
        return kernels.choose(self.device, self.mode)

    def tensor(self, name: str) -> Tensor:
        """A parameter of the model, to work with."""
        tensor = self.parts.tensor(name).to(self.device, torch.float32)
        if not tensor.isfinite().all():  # rounding would make it look sound
            raise UserError(self.source, f"{name} holds values that are not finite", "Take weights from before that.")
        return tensor

    def row_pieces(self, name: str) -> list[slice]:
        """The outputs of a matrix that are tensors of their own on disk, such as queries, keys and values."""
        stem, _, leaf = name.rpartition(".")
        parameter, expert = (stem, (int(leaf),)) if leaf.isdigit() else (name, ())
        parts = [place.part for place in self._written.get(parameter, ()) if place.part[: len(expert)] == expert]
        rows = [part[-1] for part in parts if part and isinstance(part[-1], slice)]
        return rows or [slice(None)]

    @cached_property
    def _written(self) -> dict[str, list[Place]]:
        """Where each parameter will lie on disk."""
        config = write_config(self.config)[0]
        return by_parameter(family_for(config.family, self.source).layouts(config)[0])

    @property
    def config(self) -> ModelConfig:
        return self.parts.config

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.config.dtype)
        return found
