"""Matrices of floating-point numbers on disk: compressed-tensors' float formats, and FP8 by blocks as DeepSeek has it.

What is written: `weight` (FP8) or `weight_packed` (4 bits), `weight_scale` and, for NVFP4, `weight_global_scale`. In
the layout `fp8`, which DeepSeek and Qwen release their models in, the scales of blocks are called `weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moesaic.model.families import Place
from moesaic.model.formats import float4
from moesaic.model.formats.float_matrix import FLOAT_FORMATS, FloatMatrix

Made = tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]
DISK_NAMES = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}


def entries_for(place: Place, name: str, matrix: Callable[[], FloatMatrix], layout: str) -> Iterator[Made]:
    """What is written for the part of a matrix that `place` names."""
    rows = place.part[-1] if place.part and isinstance(place.part[-1], slice) else slice(None)
    module, (outputs, inputs) = place.name.removesuffix(".weight"), place.shape
    form = FLOAT_FORMATS[name]
    if form.bits == 8:
        yield f"{module}.weight", torch.float8_e4m3fn, (outputs, inputs), lambda: matrix().stored[rows]
        high, groups = form.rows or outputs, -(-inputs // form.group_of(inputs))
        shape = (1,) if not form.rows else (-(-outputs // high), groups)
        ending = "weight_scale_inv" if layout == "fp8" else "weight_scale"
        yield f"{module}.{ending}", torch.float32, shape, lambda: matrix().scales_OG[rows][::high].reshape(shape)
        return
    groups = inputs // form.group
    yield f"{module}.weight_packed", torch.uint8, (outputs, inputs // 2), lambda: matrix().stored[rows]
    if name == "mxfp4":
        scales = f"{module}.weight_scale"
        yield scales, torch.uint8, (outputs, groups), lambda: float4.exponents(matrix().scales_OG[rows])
        return
    yield f"{module}.weight_scale", torch.float8_e4m3fn, (outputs, groups), lambda: matrix().scales_OG[rows]

    def global_scale() -> Tensor:
        found = matrix().global_scale
        assert found is not None
        return found.reshape(1)

    yield f"{module}.weight_global_scale", torch.float32, (1,), global_scale


def described(name: str) -> dict[str, Any]:
    """A config group of compressed-tensors."""
    form = FLOAT_FORMATS[name]
    strategies = {"fp8_tensor": "tensor", "fp8_channel": "channel", "fp8_block": "block", "nvfp4": "tensor_group"}
    weights: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategies.get(name, "group"),
        "group_size": form.group if form.bits == 4 else None,
        "dynamic": False,
    }
    if name == "fp8_block":
        weights["block_structure"] = [form.rows, form.group]
    if form.bits == 4:
        weights["scale_dtype"] = "torch.uint8" if name == "mxfp4" else "torch.float8_e4m3fn"
    return {"weights": weights, "input_activations": None, "format": DISK_NAMES.get(name, "float-quantized")}


def fp8_settings(plain: list[str]) -> dict[str, Any]:
    """config.json's part in the layout `fp8`; `plain` are linear modules that were left as they are."""
    form = FLOAT_FORMATS["fp8_block"]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [form.rows, form.group],
        "modules_to_not_convert": plain,
    }
