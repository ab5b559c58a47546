"""Where the weights of layers are that are not in a buffer: in the model directory, in a file of our own, or in host
memory. A store copies the tensors of one layer to where they are wanted; a layer is named by its number."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.families import Place
from moesaic.model.formats.checkpoint import Checkpoint, Source
from moesaic.parallel.offload.staging import Buffer, aligned
from moesaic.serve.offload.pinned import host_tensor

AT_ONCE = 2**30  # bytes of one read


def laid_out(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of some bytes as these tensors, which have shapes at least, one after the other."""
    views, at = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        views.append(memory[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += aligned(size)
    return views


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """That these take when laid out."""
    return sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


class LayerStore(Protocol):
    def read(self, number: int, memory: Tensor) -> None:
        """All tensors of a layer, laid out in these bytes; to a GPU in its current stream."""


class HostLayers:
    """In host memory, pinned for a GPU."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.layers: dict[Hashable, Tensor] = {}

    def put(self, number: Hashable, tensors: Sequence[Tensor]) -> None:
        self.layers[number] = host_tensor((bytes_of(tensors),), torch.uint8, self.pinned)
        for view, tensor in zip(laid_out(self.layers[number], tensors), tensors, strict=True):
            view.copy_(tensor)

    def size(self, number: Hashable) -> int:
        return self.layers[number].numel()

    def read(self, number: Hashable, memory: Tensor) -> None:
        memory.copy_(self.layers[number], non_blocking=True)


class SpilledLayers:
    """In a file without a name, whose space is free again when the process ends: for weights that lie on disk in a form
    which it takes long to make ready."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as this object lives)
        except OSError as error:
            raise UserError(self.folder, f"cannot hold offloaded weights ({error.strerror})") from None
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._end = 0

    def put(self, number: Hashable, tensors: Sequence[Tensor]) -> None:
        memory = torch.zeros(bytes_of(tensors), dtype=torch.uint8)
        for view, tensor in zip(laid_out(memory, tensors), tensors, strict=True):
            view.copy_(tensor)
        data, at = memory.numpy().data, self._end
        self._places[number] = (at, len(data))
        self._end += len(data)
        try:
            while len(data):
                done = os.pwrite(self._file.fileno(), data[:AT_ONCE], at)
                data, at = data[done:], at + done
        except OSError as error:
            problem = f"no space for offloaded weights ({error.strerror})"
            raise UserError(self.folder, problem, "Free some, or name another folder (TMPDIR).") from None

    def size(self, number: Hashable) -> int:
        return self._places[number][1]

    def read(self, number: Hashable, memory: Tensor) -> None:
        offset, size = self._places[number]
        data = memory[:size].numpy().data
        while len(data):
            count = os.preadv(self._file.fileno(), [data[:AT_ONCE]], offset)
            if not count:
                raise UserError(self.folder, "offloaded weights can no longer be read")
            data, offset = data[count:], offset + count


class DiskLayers:
    """In the model directory as they are. `layers` are the shapes and types of each layer's tensors, `places` where on
    disk each is."""

    def __init__(
        self, source: Source, layers: Mapping[int, Sequence[Tensor]], places: Mapping[int, Sequence[list[Place]]]
    ) -> None:
        self.source, self.layers, self.places = source, layers, places

    def read(self, number: int, memory: Tensor) -> None:
        for tensor, places in zip(laid_out(memory, self.layers[number]), self.places[number], strict=True):
            for place in places:
                self._read(place, tensor[place.part] if place.part else tensor)

    def _read(self, place: Place, out: Tensor) -> None:
        source = self.source
        if isinstance(source, Checkpoint) and source.dtype(place.name) == out.dtype and out.is_contiguous():
            source.read_into(out, place.name)
        else:
            out.copy_(source.tensor(place.name))


class StagedLayers:
    """Another store's layers for a GPU, through a pinned buffer."""

    def __init__(self, store: LayerStore, size: int) -> None:
        self.store = store
        self.buffer = Buffer(size, pinned=True)

    def read(self, number: int, memory: Tensor) -> None:
        self.buffer.wait()  # until what it held before is on the device
        staged = self.buffer.bytes[: memory.numel()]
        self.store.read(number, staged)
        memory.copy_(staged, non_blocking=True)
        assert self.buffer.done is not None
        self.buffer.done.record()
