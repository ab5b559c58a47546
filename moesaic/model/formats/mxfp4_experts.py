"""gpt-oss as released: experts of all layers in MXFP4, all else plain.

A tensor `T` of experts is `T_blocks` (E, outputs, groups, 16), two e2m1 numbers in a byte, and `T_scales` (E, outputs,
groups), the e8m0 exponent of 32 inputs. They stay so: twice a number is a whole one, which kernels here multiply by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.families import Place
from moesaic.model.formats.checkpoint import Checkpoint, QuantizedCheckpoint
from moesaic.model.formats.float4 import mxfp4_matrix
from moesaic.model.formats.float8 import plain_dtype
from moesaic.model.formats.packed import CPU
from moesaic.model.formats.quantized import Quantized, Scheme
from moesaic.model.formats.tensor_file import Part
from moesaic.model.formats.turned import from_disk, turned_in

MXFP4 = "mxfp4"
BLOCKS, SCALES, BYTES = "_blocks", "_scales", 16  # of a group


class MXFP4Experts(QuantizedCheckpoint):
    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw)
        self._dtype = plain_dtype(self.config, self._where)
        self._tensors = [name.removesuffix(BLOCKS) for name in self._stored if name.endswith(BLOCKS)]
        for name in self._tensors:
            self._check(name)

    def _check(self, name: str) -> None:
        blocks, scales = name + BLOCKS, name + SCALES
        if scales not in self._stored:
            raise UserError(self.place, f"1 tensor missing: {scales}", "Copy it again.")
        shape = self._stored[blocks]
        fits = len(shape) == 4 and shape[3] == BYTES and self._stored[scales] == shape[:3]
        if not fits or {self._raw.dtype(blocks), self._raw.dtype(scales)} != {torch.uint8}:
            problem = f"{blocks} {shape} and {scales} {self._stored[scales]} are no MXFP4 experts"
            raise UserError(self.place, problem, "Copy it again.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: shape for name, shape in self._stored.items() if not name.endswith((BLOCKS, SCALES))}
        return plain | {name: self._size(name) for name in self._tensors}

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        if name not in self._tensors:
            return self._raw.tensor(name, part)
        experts, rest = range(self._size(name)[0]), part[1:]
        if part and isinstance(part[0], int):
            return self._matrix(name, part[0]).dense().to(self._dtype)[rest or ...]
        chosen = experts[part[0]] if part and isinstance(part[0], slice) else experts
        dense = torch.stack([self._matrix(name, expert).dense().to(self._dtype) for expert in chosen])
        return dense[(slice(None), *rest)]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype if name in self._tensors else self._raw.dtype(name)

    def quantized(
        self, parameter: str, places: list[Place], device: torch.device, experts: Sequence[int] | None = None
    ) -> Quantized | None:
        (name, *others) = [place.name for place in places]
        if name not in self._tensors or others:
            return None
        wanted = range(self._size(name)[0]) if experts is None else experts
        return nn.ModuleList(self._matrix(name, expert, device) for expert in wanted)

    def schemes(self) -> Iterator[tuple[str, Scheme]]:
        for name in self._tensors:
            matrix = self._matrix(name, 0)
            yield name, Scheme(matrix.bits, matrix.group)

    def _size(self, name: str) -> tuple[int, int, int]:
        count, outputs, groups, _ = self._stored[name + BLOCKS]
        return count, outputs, groups * BYTES * 2

    def _matrix(self, name: str, expert: int, device: torch.device = CPU) -> QuantizedMatrix:
        """Blocks have outputs first; only the rows of gate and up lie in turns."""
        rows = replace(turned_in(self.config, name), inputs_first=False)
        packed = from_disk(rows, self._raw.tensor(name + BLOCKS, (expert,)).flatten(1)[None])[0]
        exponents = from_disk(rows, self._raw.tensor(name + SCALES, (expert,))[None])[0]
        return mxfp4_matrix(packed, exponents, device)
