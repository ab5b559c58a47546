"""Where experts are that are not in the cache: in the model directory on disk, or in host memory.

An expert is a few tensors: the matrices gate_up (2F, D) and down (D, F), or what quantized ones are made of. A store
copies them into a slot. From disk they are read as they are needed, straight into the slot and by plain reads: through
a memory map the pages that were read would count as this process's memory beside the cache, whose limit is hard, and a
file that shrinks would end the process. What was read recently the system keeps, as far as memory is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.model.families import Place
from moesaic.model.formats.checkpoint import Checkpoint, Source
from moesaic.model.formats.tensor_file import Part
from moesaic.parallel.offload.staging import Buffer, aligned
from moesaic.serve.offload.expert_cache import Key
from moesaic.serve.offload.pinned import host_tensor

STAGED = 2  # pinned buffers through which what is read from disk passes to a GPU


class ExpertStore(Protocol):
    def read(self, key: Key, into: Sequence[Tensor]) -> None:
        """Copy an expert's tensors; to a GPU in its current stream."""


class Piece(NamedTuple):
    """A tensor on disk, or a part of one, and where in an expert's tensors it goes."""

    name: str
    part: Part
    tensor: int
    rows: slice


class DiskExperts:
    """`places[layer]` are those of the layer's gate_up and of its down."""

    def __init__(self, source: Source, places: Sequence[tuple[list[Place], list[Place]]]) -> None:
        self.source = source
        self._pieces = [_pieces(of_layer) for of_layer in places]
        self._buffers: list[Buffer] = []
        self._next = 0

    def read(self, key: Key, into: Sequence[Tensor]) -> None:
        if into[0].is_cuda:
            self._through_buffer(key, into)
            return
        layer, expert = key
        for piece in self._pieces[layer][expert]:
            self._read(piece, into[piece.tensor][piece.rows])

    def _read(self, piece: Piece, out: Tensor) -> None:
        source = self.source
        if isinstance(source, Checkpoint) and source.dtype(piece.name) == out.dtype:
            source.read_into(out, piece.name, piece.part)
        else:
            out.copy_(source.tensor(piece.name, piece.part))

    def _through_buffer(self, key: Key, into: Sequence[Tensor]) -> None:
        if not self._buffers:
            size = sum(aligned(tensor.numel() * tensor.element_size()) for tensor in into)
            self._buffers = [Buffer(size, pinned=True) for _ in range(STAGED)]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % STAGED
        buffer.wait()  # until what it held before is on the device
        staged = buffer.lay_out(into)
        self.read(key, staged)
        for target, source in zip(into, staged, strict=True):
            target.copy_(source, non_blocking=True)
        assert buffer.done is not None
        buffer.done.record()


def _pieces(places: tuple[list[Place], list[Place]]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for number, of_tensor in enumerate(places):
        for place in of_tensor:
            if not place.part:  # all experts in one tensor
                for expert in range(place.shape[0]):
                    found.setdefault(expert, []).append(Piece(place.name, (expert,), number, slice(None)))
                continue
            own, *rest = place.part
            assert isinstance(own, int) and len(rest) <= 1
            rows = rest[0] if rest else slice(None)
            assert isinstance(rows, slice)
            found.setdefault(own, []).append(Piece(place.name, (), number, rows))
    return found


class HostExperts:
    """Experts in host memory, pinned for a GPU. The first `fixed` of every layer are not kept: they are in the cache
    for good."""

    def __init__(self, pinned: bool, fixed: int = 0) -> None:
        self.pinned, self.fixed = pinned, fixed
        self.layers: list[list[Tensor]] = []  # (experts, ...) each

    def add_layer(self, count: int, specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Memory for a layer's experts, to be filled by the caller."""
        made = [host_tensor((count - self.fixed, *shape), dtype, self.pinned) for shape, dtype in specs]
        self.layers.append(made)
        return made

    def fill_layer(self, store: ExpertStore, count: int, specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """The next layer's experts, from another store."""
        layer = len(self.layers)
        made = self.add_layer(count, specs)
        for expert in range(self.fixed, count):
            store.read((layer, expert), [tensor[expert - self.fixed] for tensor in made])

    def read(self, key: Key, into: Sequence[Tensor]) -> None:
        layer, expert = key
        assert expert >= self.fixed, f"expert {expert} of layer {layer} is not in the store"
        for target, tensor in zip(into, self.layers[layer], strict=True):
            target.copy_(tensor[expert - self.fixed], non_blocking=True)
