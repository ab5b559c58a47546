"""How a model's parameters are divided under a layout: by what each rank computes with, then among its sharers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moesaic.model.transformer import Model
from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.parts import Part, Region, regions
from moesaic.parallel.pipeline.stages import Stages
from moesaic.parallel.tensor.partition import part_of
from moesaic.sharded import local

Kind = Literal["dense", "tensor", "expert"]
EXPERTS = ("gate_up_EGD", "down_EDF")


class Division:
    """`shapes` are of the whole model's tensors, by name and in its order; `parameters` those that are learned."""

    def __init__(self, whole: Model, mesh: ParallelMesh, stages: Stages | None = None) -> None:
        self.config, self.mesh, self.stages = whole.config, mesh, stages
        self.shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
        self.parameters = [name for name, _ in whole.named_parameters()]

    def kind(self, name: str) -> Kind:
        if name.rpartition(".")[2] in EXPERTS:
            return "expert"
        return "dense" if self._tensor_part(name) is None else "tensor"

    def _tensor_part(self, name: str) -> Part | None:
        return part_of(name, self.shapes[name], self.config, self.mesh.place.tp, self.mesh.layout.tp)

    def part(self, name: str) -> Part | None:
        """What this rank computes with; None is all of it."""
        shape, layout = self.shapes[name], self.mesh.layout
        if self.kind(name) == "expert" and layout.ep > 1:
            here = shape[0] // layout.ep
            return Part(0, ((self.mesh.place.ep * here, (self.mesh.place.ep + 1) * here),))
        return self._tensor_part(name)

    def local_shape(self, name: str) -> tuple[int, ...]:
        part = self.part(name)
        return part.shape(self.shapes[name]) if part is not None else self.shapes[name]

    def regions(self, name: str, tensor: Tensor) -> list[Region]:
        """Where this rank's share of a tensor lies in the whole one; `tensor` is the parameter as the model has it."""
        return regions(self.shapes[name], self.part(name), rows_of(tensor))

    def copies(self, name: str, tensor: Tensor) -> int:
        """How many ranks hold the same numbers."""
        sharers = self.mesh.sharers(self.kind(name)).size()
        if not isinstance(tensor, DTensor):
            return sharers
        return sharers // tensor.device_mesh.size() * _replicas(tensor)

    def is_copy(self, name: str) -> bool:
        """Whether another pipeline stage holds it too, and counts it."""
        return self.stages is not None and name in self.stages.copied(self.mesh.place.pp)

    def is_first(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank is the first of those that hold the same numbers."""
        if self.is_copy(name):
            return False
        if isinstance(tensor, DTensor):
            at = tensor.device_mesh.get_coordinate()
            assert at is not None
            return all(
                not place.is_replicate() or not index for place, index in zip(tensor.placements, at, strict=True)
            )
        return self.mesh.sharers(self.kind(name)).get_local_rank() == 0

    @torch.no_grad()
    def assemble(self, name: str, parameter: Tensor | None, values: Tensor | None) -> Tensor:
        """The whole tensor on every rank, from what each has of it (`values`, laid out as its parameter is; None where
        a rank holds nothing). Every element comes from one rank and is added to zeros, so the bits stay."""
        shape = self.shapes[name]
        device = self.mesh.device
        found = torch.zeros(shape, device=device) if values is None else local(values).new_zeros(shape)
        if parameter is not None and values is not None and self.is_first(name, parameter):
            for region in regions(shape, self.part(name), rows_of(parameter), once=True):
                found[region.whole] = local(values)[region.here]
        torch.distributed.all_reduce(found)
        return found


def rows_of(tensor: Tensor) -> tuple[int, int] | None:
    """Which rows of a tensor that is divided among ranks lie here; None if it is not divided."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not shape or not all(shape):
        return 0, 0
    return offset[0], offset[0] + shape[0]


def _replicas(tensor: DTensor) -> int:
    count = 1
    for size, place in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        count *= size if place.is_replicate() else 1
    return count
