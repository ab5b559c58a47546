"""NVFP4 checkpoints in the compressed-tensors layout, read as plain weights.

A matrix `M` is `M.weight_packed` (e2m1, two in a byte), `M.weight_scale` (e4m3, one for 16 inputs) and
`M.weight_global_scale`, by which scales are divided. Sixteen inputs are half of what our integer kernels share a scale
among, so weights are dequantized when they are read; rounding of activations is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.formats.checkpoint import QUANTIZATION, Checkpoint, QuantizedCheckpoint
from moesaic.model.formats.float8 import plain_dtype
from moesaic.model.formats.float_matrix import FLOAT_FORMATS, FloatMatrix
from moesaic.model.formats.tensor_file import Part

_LEFT_OUT = (".input_global_scale", ".input_scale")
_AGAIN = "Copy it again."


def is_nvfp4(settings: Any) -> bool:
    groups = settings.get("config_groups") if isinstance(settings, dict) else None
    return isinstance(groups, dict) and any(map(_of_nvfp4, groups.values()))


def _of_nvfp4(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    wanted = {"type": "float", "num_bits": 4, "group_size": 16}
    return isinstance(weights, dict) and wanted.items() <= weights.items()


class NVFP4Source(QuantizedCheckpoint):
    def __init__(self, raw: Checkpoint) -> None:
        super().__init__(raw)
        if not all(map(_of_nvfp4, self._settings["config_groups"].values())):
            problem = f"{QUANTIZATION}: NVFP4 weights beside others are not read"
            raise UserError(self._where, problem, "Quantize all of them in one way.")
        self._dtype = plain_dtype(self.config, self._where)
        ending = ".weight_packed"
        self._modules = {name.removesuffix(ending) for name in self._stored if name.endswith(ending)}
        for module in self._modules:
            self._check(module)

    def _check(self, module: str) -> None:
        """That its tensors are there and fit."""
        outputs, width = self._stored[f"{module}.weight_packed"]
        group = FLOAT_FORMATS["nvfp4"].group
        wanted = {
            "weight_packed": ((outputs, width), torch.uint8),
            "weight_scale": ((outputs, width * 2 // group), torch.float8_e4m3fn),
            "weight_global_scale": ((1,), torch.float32),
        }
        for name, (shape, dtype) in wanted.items():
            full = f"{module}.{name}"
            if full not in self._stored:
                raise UserError(self.place, f"1 tensor missing: {full}", _AGAIN)
            if self._stored[full] != shape or self._raw.dtype(full) != dtype:
                problem = f"{full} is {self._stored[full]} of {self._raw.dtype(full)}, not {shape} of {dtype}"
                raise UserError(self.place, problem, _AGAIN)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, shape in self._stored.items():
            module = name.rpartition(".")[0]
            if name.endswith(_LEFT_OUT) or (module in self._modules and name != f"{module}.bias"):
                continue
            found[name] = shape
        for module in self._modules:
            outputs, width = self._stored[f"{module}.weight_packed"]
            found[f"{module}.weight"] = (outputs, width * 2)
        return found

    def tensor(self, name: str, part: Part = ()) -> Tensor:
        module = name.removesuffix(".weight")
        if module not in self._modules or name == module:
            return self._raw.tensor(name, part)
        stored = (self._raw.tensor(f"{module}.weight_{of}") for of in ("packed", "scale", "global_scale"))
        packed, scales_OG, global_scale = stored
        dense = FloatMatrix("nvfp4", packed, scales_OG.float(), global_scale).dense().to(self._dtype)
        return dense[part] if part else dense

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype if name.removesuffix(".weight") in self._modules else self._raw.dtype(name)
