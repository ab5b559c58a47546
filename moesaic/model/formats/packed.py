"""Quantized matrices of linear modules, packed in words of 32 bits: what layouts written by other tools share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.families import Place
from moesaic.model.formats.checkpoint import QuantizedCheckpoint
from moesaic.model.formats.quantized import Quantized, Scheme
from moesaic.model.formats.tensor_file import Part

CPU = torch.device("cpu")


class PackedModules(QuantizedCheckpoint, ABC):
    """A source, and its matrices as they are. `_modules` are the names of the quantized ones."""

    _modules: set[str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, shape in self._stored.items():
            module = name.rpartition(".")[0]
            if module not in self._modules or name == f"{module}.bias":
                found[name] = shape
        return found | {f"{module}.weight": self._size(module) for module in self._modules}

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        module = name.removesuffix(".weight")
        if module not in self._modules or name == module:
            return self._raw.tensor(name, part)
        dense = self._matrix(module).dense().to(self._kind(module))
        return dense[part] if part else dense

    def quantized(
        self, parameter: str, places: list[Place], device: torch.device, experts: Sequence[int] | None = None
    ) -> Quantized | None:
        if experts is not None:
            places = [place for place in places if place.part and place.part[0] in experts]
        modules = [place.name.removesuffix(".weight") for place in places]
        if not any(module in self._modules for module in modules):
            return None
        if not all(module in self._modules for module in modules):
            raise UserError(
                self.place, f"only some of {', '.join(modules[:3])} are quantized", "Quantize them in one way."
            )
        by_expert: dict[Any, list[QuantizedMatrix]] = defaultdict(list)
        for place, module in zip(places, modules, strict=True):
            expert = place.part[0] if place.part and isinstance(place.part[0], int) else None
            by_expert[expert].append(self._matrix(module, device))
        joined = {expert: _joined(parts, self.place) for expert, parts in by_expert.items()}
        return joined[None] if None in joined else nn.ModuleList(joined.values())

    def schemes(self) -> Iterator[tuple[str, Scheme]]:
        for module in sorted(self._modules):
            matrix = self._matrix(module)
            yield module, Scheme(matrix.bits, matrix.group, matrix.activation_bits, matrix.zeros_GO is not None)

    @abstractmethod
    def _kind(self, module: str) -> torch.dtype:
        """Of plain weights."""

    @abstractmethod
    def _size(self, module: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _matrix(self, module: str, device: torch.device = CPU) -> QuantizedMatrix: ...


def _joined(parts: list[QuantizedMatrix], where: Path) -> QuantizedMatrix:
    """Queries, keys and values, or gate and up, as one."""
    first = parts[0]
    kinds = {(part.bits, part.group, part.activation_bits, part.zeros_GO is None) for part in parts}
    if len(kinds) > 1:
        raise UserError(
            where, "matrices that are read as one are quantized in different ways", "Quantize them in one way."
        )
    if len(parts) == 1:
        return first
    zeros = [part.zeros_GO for part in parts if part.zeros_GO is not None]
    return QuantizedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales_GO for part in parts], dim=1),
        torch.cat(zeros, dim=1) if zeros else None,
        inputs=first.shape[1],
        bits=first.bits,
        group=first.group,
        activation_bits=first.activation_bits,
    )


def pack32(codes_OI: Tensor, bits: int) -> Tensor:
    """A row as one stream of bits, lowest first, in words of 32."""
    count = codes_OI.shape[1]
    words = -(-count * bits // 32)
    ones = np.unpackbits(codes_OI.numpy()[:, :, None], axis=2, bitorder="little")[:, :, :bits].reshape(
        len(codes_OI), -1
    )
    ones = np.pad(ones, ((0, 0), (0, words * 32 - count * bits)))
    return torch.from_numpy(np.packbits(ones, axis=1, bitorder="little").view(np.int32))


def unpack32(words: Tensor, bits: int, count: int) -> Tensor:
    ones = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    ones = ones.reshape(len(words), count, bits)
    return torch.from_numpy(np.packbits(ones, axis=2, bitorder="little").squeeze(2))
