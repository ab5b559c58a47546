"""Quantized weights as GPTQ's and AWQ's tools write them, read as they are.

Both keep a matrix `M` as `M.qweight`, `M.qzeros` and `M.scales` (groups, outputs), in words of 32 bits; a weight is
scale * (code - zero). GPTQ packs codes along the inputs, (inputs, outputs), and stores zeros less one in its first
format. AWQ packs them along the outputs, eight to a word in the order of `AWQ_ORDER`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.quantized import BITS, BLOCK, QuantizedMatrix, padded
from moesaic.model.formats.checkpoint import QUANTIZATION, Checkpoint
from moesaic.model.formats.packed import CPU, PackedModules, unpack32

METHODS = ("gptq", "awq")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_REMEDY = "Take weights of 2, 3, 4 or 8 bits (AWQ: 4, as GEMM) in groups of a multiple of 32, inputs in their order."


class GPTQAndAWQ(PackedModules):
    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw)
        self._awq, self._bits, self._group, self._less = _read(self._settings, raw)
        self._symmetric = self._settings.get("sym") is True
        self._modules = {name.removesuffix(".qweight") for name in self._stored if name.endswith(".qweight")}

    def _kind(self, module: str) -> torch.dtype:
        return self._raw.dtype(f"{module}.scales")

    def _size(self, module: str) -> tuple[int, ...]:
        shape = self._stored[f"{module}.qweight"]
        if len(shape) != 2:
            raise UserError(self.place, f"{module}.qweight is no matrix", _REMEDY)
        bits = shape[1 if self._awq else 0] * 32
        if bits % self._bits:
            raise UserError(self.place, f"{module}.qweight holds no whole codes", _REMEDY)
        wide = bits // self._bits
        return (wide, shape[0]) if self._awq else (shape[1], wide)

    def _matrix(self, module: str, device: torch.device = CPU) -> QuantizedMatrix:
        outputs, inputs = self._size(module)
        group = self._group or padded(inputs)
        groups = -(-inputs // group)
        scales_GO = self._part(module, "scales", (groups, outputs)).float()
        zeros_GW = self._part(module, "qzeros", (groups, -(-outputs * self._bits // 32)))
        words = self._raw.tensor(f"{module}.qweight")
        if words.dtype != torch.int32 or zeros_GW.dtype != torch.int32:
            raise UserError(self.place, f"{module} is not packed in words of 32 bits", _REMEDY)
        if self._awq:
            codes_OI = _in_order(unpack32(words, 4, outputs)).T
            zeros_GO = _in_order(unpack32(zeros_GW, 4, outputs)).float()
        else:
            codes_OI = unpack32(words.T.contiguous(), self._bits, inputs)
            zeros_GO = unpack32(zeros_GW, self._bits, outputs).float() + self._less
            self._check_order(module, inputs, group)
        in_the_middle = self._symmetric and bool((zeros_GO == 2 ** (self._bits - 1)).all())
        zeros_OG = None if in_the_middle else zeros_GO.T.contiguous().to(device)
        codes_OI, scales_OG = codes_OI.contiguous().to(device), scales_GO.T.contiguous().to(device)
        return QuantizedMatrix.of(codes_OI, scales_OG, zeros_OG, self._bits, group, 16)

    def _part(self, module: str, name: str, shape: tuple[int, int]) -> Tensor:
        found = self._stored.get(f"{module}.{name}")
        if found != shape:
            told = "is missing" if found is None else f"is {'x'.join(map(str, found))}, not {shape[0]}x{shape[1]}"
            raise UserError(self.place, f"{module}.{name} {told}", "Copy it again.")
        return self._raw.tensor(f"{module}.{name}")

    def _check_order(self, module: str, inputs: int, group: int) -> None:
        name = f"{module}.g_idx"
        if name in self._stored and not torch.equal(self._raw.tensor(name).long(), torch.arange(inputs) // group):
            raise UserError(self.place, f"{module} has its inputs in another order (desc_act)", _REMEDY)


def _in_order(codes_XO: Tensor) -> Tensor:
    """From the order in which AWQ packs eight outputs."""
    words_XW8 = codes_XO.unflatten(1, (-1, 8))
    back = torch.tensor(AWQ_ORDER).argsort()
    return words_XW8[..., back].flatten(1)


def _read(settings: dict[str, Any], raw: Checkpoint) -> tuple[bool, int, int, int]:
    """Whether it is AWQ, bits, group (0: all inputs), what zeros are stored less."""

    def wrong(problem: str) -> UserError:
        return UserError(raw.place / "config.json", f"{QUANTIZATION}: {problem}", _REMEDY)

    awq = settings.get("quant_method") == "awq"
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    if type(bits) is not int or bits not in BITS or bits == 1 or (awq and bits != 4):
        raise wrong(f"weights of {str(bits)[:20]} bits cannot be run")
    if type(group) is not int or group == 0 or group < -1 or (group > 0 and group % BLOCK):
        raise wrong(f"groups of {str(group)[:20]}")
    if awq and str(settings.get("version", "gemm")).lower() != "gemm":
        raise wrong(f"version {str(settings['version'])[:20]!r} is not read")
    first = str(settings.get("checkpoint_format") or "gptq") == "gptq"
    if not awq and not first and settings["checkpoint_format"] != "gptq_v2":
        raise wrong(f"checkpoint_format {str(settings['checkpoint_format'])[:20]!r} is not read")
    return awq, bits, max(group, 0), 1 if first and not awq else 0
