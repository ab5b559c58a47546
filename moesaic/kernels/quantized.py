"""Matrices of small integers, and kernels that multiply by them beside plain ones.

A weight is scale * (code - zero); scale and zero belong to a group of neighbouring inputs of one output.
`docs/compress.md` shows how codes are packed on disk, `native/quantized.h` how they lie in memory. `dense` is the
meaning; the native kernel rounds the rows it multiplies to 15 bits a group, a relative error of 5e-5, or to 8 bits a
row where the matrix was made for that (W8A8, W4A8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.kernels.interface import Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights

BITS = (1, 2, 3, 4, 5, 6, 8)
BLOCK = 32  # inputs that are packed together
TILE = 8  # outputs that lie together
# How far apart the inputs lie that share a byte, and by how many bits each is shifted there.
_SPREAD = {1: 4, 2: 8, 4: 16, 8: 32}
# Bits that do not divide a byte: the low ones first, then the high ones.
_TOGETHER = {3: (2, 1), 5: (4, 1), 6: (4, 2)}


class QuantizedWeight(nn.Module):
    """A matrix, or those of a layer's experts, quantized: in whatever form it lies in memory."""

    shape: torch.Size
    dtype: torch.dtype  # of what comes out

    def rows(self, chosen: Tensor) -> Tensor:
        """Some rows of it: what an embedding looks up."""
        raise NotImplementedError

    def linear(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        raise NotImplementedError

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def bytes(self) -> int:
        """In memory, corrections included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.buffers())


class QuantizedMatrix(QuantizedWeight):
    """(O, I) as integers of `bits`, with a correction of low rank where there is one."""

    tiles_XB: Tensor  # uint8: X tiles of eight outputs
    scales_XGO: Tensor  # of a tile's groups and its eight outputs
    zeros_XGO: Tensor | None  # None: the middle of the codes

    def __init__(
        self,
        codes: Tensor,
        scales_GO: Tensor,
        zeros_GO: Tensor | None,
        *,
        inputs: int,
        bits: int,
        group: int,
        activation_bits: int = 16,
    ) -> None:
        super().__init__()
        assert bits in BITS and group % BLOCK == 0, f"{bits} bits in groups of {group}"
        self.bits, self.group, self.activation_bits = bits, group, activation_bits
        self.shape = torch.Size((scales_GO.shape[1], inputs))
        assert codes.shape == (self.shape[0], padded(inputs) * bits // 8), "codes do not fit the shape"
        assert scales_GO.shape[0] == -(-inputs // group), "scales do not fit the groups"
        self.register_buffer("tiles_XB", tiled(unpack(codes, bits), bits))
        self.register_buffer("scales_XGO", _by_tile(scales_GO))
        self.register_buffer("zeros_XGO", None if zeros_GO is None else _by_tile(zeros_GO))
        self.dtype = torch.float32  # of what comes out
        self.kept: tuple[int, int] | None = None  # at most N of every M inputs are not zero, and it is stored so
        # MiLo: what is added to the product, up @ down.
        self.down_RI: QuantizedMatrix | None = None
        self.up_OR: QuantizedMatrix | None = None

    @classmethod
    def of(
        cls,
        codes_OI: Tensor,
        scales_OG: Tensor,
        zeros_OG: Tensor | None,
        bits: int,
        group: int,
        activation_bits: int = 16,
    ) -> QuantizedMatrix:
        """From one code per weight."""
        zeros_GO = None if zeros_OG is None else zeros_OG.float().T.contiguous()
        return cls(
            pack(codes_OI, bits),
            scales_OG.float().T.contiguous(),
            zeros_GO,
            inputs=codes_OI.shape[1],
            bits=bits,
            group=group,
            activation_bits=activation_bits,
        )

    @property
    def codes(self) -> Tensor:
        """Packed row by row, as on disk."""
        return pack(untiled(self.tiles_XB, self.bits).flatten(0, 1)[: self.shape[0]], self.bits)

    @property
    def scales_GO(self) -> Tensor:
        return self._by_output(self.scales_XGO)

    @property
    def zeros_GO(self) -> Tensor | None:
        return None if self.zeros_XGO is None else self._by_output(self.zeros_XGO)

    def _by_output(self, of_XGO: Tensor) -> Tensor:
        return of_XGO.transpose(0, 1).flatten(1)[:, : self.shape[0]].contiguous()

    @property
    def device(self) -> torch.device:
        return self.tiles_XB.device

    def dense(self) -> Tensor:
        """The matrix it stands for, (O, I)."""
        out_OI = self.own()
        if self.up_OR is not None and self.down_RI is not None:
            out_OI = out_OI + self.up_OR.dense() @ self.down_RI.dense()
        return out_OI

    def own(self) -> Tensor:
        """The same without corrections."""
        return self._weights(slice(None)).flatten(0, 1)[: self.shape[0]]

    def rows(self, chosen: Tensor) -> Tensor:
        """Some rows of it, without corrections: what an embedding looks up."""
        places = torch.arange(len(chosen), device=chosen.device)
        return self._weights(chosen // TILE)[places, chosen % TILE]

    def _weights(self, tiles: Tensor | slice) -> Tensor:
        """Some tiles' weights (X, 8, I)."""
        codes_XOI = untiled(self.tiles_XB[tiles], self.bits).float()
        scales_XOI = self._spread(self.scales_XGO[tiles])
        zeros = 2 ** (self.bits - 1) if self.zeros_XGO is None else self._spread(self.zeros_XGO[tiles])
        return ((codes_XOI[..., : self.shape[1]] - zeros) * scales_XOI).to(self.dtype)

    def _spread(self, of_XGO: Tensor) -> Tensor:
        return of_XGO.transpose(1, 2).repeat_interleave(self.group, dim=2)[..., : self.shape[1]]

    def extra_repr(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}, {self.bits} bits, groups of {self.group}"


def padded(inputs: int) -> int:
    return -(-inputs // BLOCK) * BLOCK


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """One code per byte to `bits` per code; inputs are filled up to whole blocks."""
    codes_OI = codes_OI.to(torch.uint8)
    codes_OI = F.pad(codes_OI, (0, padded(codes_OI.shape[1]) - codes_OI.shape[1]))
    if bits in _TOGETHER:
        return _both(pack, codes_OI, bits, BLOCK // 8)
    parts = codes_OI.unflatten(1, (-1, BLOCK // _SPREAD[bits], _SPREAD[bits]))
    out = torch.zeros_like(parts[:, :, 0])
    for number in range(parts.shape[2]):
        out |= parts[:, :, number] << (bits * number)
    return out.flatten(1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """One code per byte, blocks filled up as `pack` left them."""
    if bits in _TOGETHER:
        return _apart(unpack, packed, bits, BLOCK // 8)
    bytes_OBS = packed.unflatten(1, (-1, _SPREAD[bits]))
    shifts = range(0, 8, bits) if bits < 8 else (0,)
    return torch.stack([(bytes_OBS >> shift) & (2**bits - 1) for shift in shifts], dim=2).flatten(1)


def tiled(codes_OI: Tensor, bits: int) -> Tensor:
    """One code per byte to tiles of eight outputs, as `native/quantized.h` describes them: (X, bytes of a tile)."""
    outputs, inputs = codes_OI.shape
    codes_OI = F.pad(codes_OI.to(torch.uint8), (0, padded(inputs) - inputs, 0, -outputs % TILE))
    if bits in _TOGETHER:
        return _both(tiled, codes_OI, bits, 16)
    each = 8 // bits  # quads of inputs that share a byte
    parts = codes_OI.view(
        len(codes_OI) // TILE, 2, 4, -1, 8 // each, each, 4
    )  # tile, half, output, block, vector, quad
    parts = parts.permute(0, 3, 1, 4, 5, 2, 6)
    out = parts[:, :, :, :, 0].clone()
    for quad in range(1, each):
        out |= parts[:, :, :, :, quad] << (bits * quad)
    return out.flatten(1)


def untiled(tiles_XB: Tensor, bits: int) -> Tensor:
    """One code per byte, (X, 8, I)."""
    if bits in _TOGETHER:
        return _apart(untiled, tiles_XB, bits, 16)
    each = 8 // bits
    vectors = tiles_XB.view(len(tiles_XB), -1, 2, 8 // each, 4, 4)
    parts = torch.stack([(vectors >> (bits * quad)) & (2**bits - 1) for quad in range(each)], dim=4)
    return parts.permute(0, 2, 5, 1, 3, 4, 6).reshape(len(tiles_XB), TILE, -1)


def _both(packing: Callable[[Tensor, int], Tensor], codes_OI: Tensor, bits: int, size: int) -> Tensor:
    """Low and high bits packed by themselves, then in turns: `size` bytes for each bit."""
    low, high = _TOGETHER[bits]
    parts = packing(codes_OI & (2**low - 1), low), packing(codes_OI >> low, high)
    return torch.cat([parts[0].unflatten(1, (-1, low * size)), parts[1].unflatten(1, (-1, high * size))], 2).flatten(1)


def _apart(unpacking: Callable[[Tensor, int], Tensor], packed: Tensor, bits: int, size: int) -> Tensor:
    low, high = _TOGETHER[bits]
    parts = packed.unflatten(1, (-1, bits * size)).split([low * size, high * size], dim=2)
    return unpacking(parts[0].flatten(1), low) | (unpacking(parts[1].flatten(1), high) << low)


def _by_tile(of_GO: Tensor) -> Tensor:
    """(groups, outputs) to (tiles, groups, 8)."""
    groups, outputs = of_GO.shape
    return F.pad(of_GO, (0, -outputs % TILE)).view(groups, -1, TILE).transpose(0, 1).contiguous()


def rounded_to_8_bits(x_TI: Tensor) -> Tensor:
    """Each row to 255 steps over twice its largest value, as W8A8 formats have it (ZeroQuant's token-wise rounding)."""
    scale_T1 = x_TI.abs().amax(-1, keepdim=True) / 127.5
    back_T1 = torch.where(scale_T1 > 0, 1 / scale_T1, 0)
    return (x_TI * back_T1).round().clamp(max=127) * scale_T1


class QuantizedKernels:
    """Any kernels, which then take quantized matrices too. Experts come as one matrix each, in a module list."""

    def __init__(self, plain: Kernels) -> None:
        self._plain = plain
        self.library: Any = getattr(plain, "library", None)  # of native code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def embed(self, tokens_T: Tensor, table_VD: Tensor | QuantizedWeight, site: str = "") -> Tensor:
        if isinstance(table_VD, QuantizedWeight):
            return table_VD.rows(tokens_T)
        return self._plain.embed(tokens_T, table_VD, site)

    def linear(
        self, x_TI: Tensor, weight_OI: Tensor | QuantizedWeight, bias_O: Tensor | None = None, site: str = ""
    ) -> Tensor:
        if not isinstance(weight_OI, QuantizedWeight):
            return self._plain.linear(x_TI, weight_OI, bias_O, site)
        if not isinstance(weight_OI, QuantizedMatrix):
            return weight_OI.linear(x_TI, bias_O)
        y_TO = self._matmul(x_TI, weight_OI, bias_O)
        if weight_OI.down_RI is not None and weight_OI.up_OR is not None:
            y_TO = y_TO + self._matmul(self._matmul(x_TI, weight_OI.down_RI), weight_OI.up_OR)
        return y_TO

    def _matmul(self, x_TI: Tensor, weight: QuantizedMatrix, bias_O: Tensor | None = None) -> Tensor:
        plain = x_TI.dim() == 2 and x_TI.is_cpu and x_TI.dtype == torch.float32 and not torch.is_grad_enabled()
        if self.library is not None and plain:
            return _native_matmul(self.library, x_TI, weight, bias_O)
        if weight.activation_bits == 8:
            x_TI = rounded_to_8_bits(x_TI)
        return F.linear(x_TI, weight.own().to(x_TI.dtype), bias_O)

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        gate_up_EGD, down_EDF = weights.gate_up_EGD, weights.down_EDF
        if not isinstance(gate_up_EGD, nn.ModuleList) and not isinstance(down_EDF, nn.ModuleList):
            return self._plain.experts(x_TD, routes, weights)
        # What experts add to a token is summed in the order of the experts, so that it does not depend on the batch.
        out_TD = torch.zeros_like(x_TD)
        for expert in routes.experts_TK.unique().tolist():
            rows, choices = (routes.experts_TK == expert).nonzero(as_tuple=True)
            alone = len(rows) == len(x_TD)
            bias_G = None if weights.bias_EG is None else weights.bias_EG[expert]
            both_AG = self.linear(x_TD if alone else x_TD[rows], gate_up_EGD[expert], bias_G)
            hidden_AF = self._plain.gated(both_AG, weights.activation)
            y_AD = self.linear(hidden_AF, down_EDF[expert])
            y_AD = y_AD * routes.weights_TK[rows, choices].to(y_AD.dtype)[:, None]
            if alone:
                out_TD += y_AD
            else:
                out_TD[rows] += y_AD
        return out_TD


def _native_matmul(library: Any, x_TI: Tensor, weight: QuantizedMatrix, bias_O: Tensor | None) -> Tensor:
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    rows, inputs = x_TI.shape
    y_TO = x_TI.new_empty(rows, weight.shape[0])
    zeros, planes = weight.zeros_XGO, 1 if weight.activation_bits == 8 else 2
    library.quantized_linear(
        x_TI.data_ptr(), weight.tiles_XB.data_ptr(), weight.scales_XGO.data_ptr(),
        None if zeros is None else zeros.data_ptr(), None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(),
        rows, inputs, weight.shape[0], x_TI.stride(0), weight.bits, weight.group, planes, torch.get_num_threads(),
    )  # fmt: skip
    return y_TO
