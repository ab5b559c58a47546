"""INT4 and INT8 weights as GLM-130B and ChatGLM were released in, read and written.

A matrix `M` is `M.weight` (int8) and `M.weight_scale` (float16, one for each output); a weight is its integer times the
scale. With 4 bits two inputs share a byte, the first in the high bits. config.json says `quantization_bit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.quantized import QuantizedMatrix, padded, unpack
from moesaic.model.families import Place
from moesaic.model.formats.checkpoint import GLM_BITS, Checkpoint
from moesaic.model.formats.packed import CPU, PackedModules
from moesaic.model.formats.quantized import Scheme

Made = tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]


class GLMIntegers(PackedModules):
    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw, GLM_BITS)
        self._bits = self._settings
        if type(self._bits) is not int or self._bits not in (4, 8):
            raise UserError(
                self._where, f"{GLM_BITS}: must be 4 or 8, not {str(self._bits)[:20]}", "Take such weights."
            )
        ending = ".weight_scale"
        self._modules = {name.removesuffix(ending) for name in self._stored if name.endswith(ending)}

    def _kind(self, module: str) -> torch.dtype:
        return self._raw.dtype(f"{module}.weight_scale")

    def _size(self, module: str) -> tuple[int, ...]:
        shape = self._stored.get(f"{module}.weight")
        if shape is None or len(shape) != 2 or self._stored[f"{module}.weight_scale"] != shape[:1]:
            raise UserError(self.place, f"{module}: weights and scales do not fit", "Copy it again.")
        return shape[0], shape[1] * 8 // self._bits

    def _matrix(self, module: str, device: torch.device = CPU) -> QuantizedMatrix:
        outputs, inputs = self._size(module)
        stored = self._raw.tensor(f"{module}.weight")
        if stored.dtype != torch.int8:
            raise UserError(self.place, f"{module}.weight is {stored.dtype}", "Copy it again.")
        if self._bits == 4:
            high, low = stored >> 4, (stored << 4) >> 4
            stored = torch.stack([high, low], dim=-1).flatten(1)
        codes_OI = (stored.int() + 2 ** (self._bits - 1)).to(torch.uint8).to(device)
        scales_OG = self._raw.tensor(f"{module}.weight_scale").float()[:, None].to(device)
        return QuantizedMatrix.of(codes_OI, scales_OG, None, self._bits, padded(inputs))


def entries_for(place: Place, scheme: Scheme, matrix: Callable[[], QuantizedMatrix]) -> Iterator[Made]:
    """What is written for the part of a matrix that `place` names."""
    rows = place.part[-1] if place.part and isinstance(place.part[-1], slice) else slice(None)
    module, (outputs, inputs), bits = place.name.removesuffix(".weight"), place.shape, scheme.bits
    if inputs < scheme.group and bits == 4 and inputs % 2:
        raise UserError(place.name, f"{inputs} inputs are no pairs, of which GLM makes a byte", "Take bits=8.")

    def weights() -> Tensor:
        codes_OI = unpack(matrix().codes[rows], bits)[:, :inputs].to(torch.int16) - 2 ** (bits - 1)
        if bits == 4:
            codes_OI = (codes_OI[:, 0::2] << 4) | (codes_OI[:, 1::2] & 15)
        return codes_OI.to(torch.int8)

    yield f"{module}.weight", torch.int8, (outputs, inputs * bits // 8), weights
    yield f"{module}.weight_scale", torch.float16, (outputs,), lambda: matrix().scales_GO[0, rows]
