"""`train.dtype: fp8`: the matmuls of layers in float8 (DeepSeek-V3); weights are bfloat16 with float32 masters.

What is in float8 and what is not, `moesaic/kernels/float8.py` says. The run's directory is that of a bfloat16 run.
"""

from __future__ import annotations

from typing import cast

import torch

from moesaic.errors import UserError
from moesaic.kernels.float8 import Float8Kernels, Float8Matmuls
from moesaic.kernels.interface import Kernels
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.transformer import Model

PLACE = "train.dtype"
INSTEAD = "Set it to bfloat16, or auto."
WHOLE = 128  # numbers that share a scale: experts' sides are multiples of it


def matmuls(device: torch.device) -> Float8Matmuls:
    """Those of this device; where it has none, refused."""
    needed = "matmuls in 8 bits need a GPU with tensor cores for them that kernels are written for (Hopper)"
    if device.type != "cuda":
        raise UserError(PLACE, f"{needed}, and this machine has no GPU", INSTEAD)
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise UserError(PLACE, f"{needed}, and this one is {torch.cuda.get_device_name(device)}", INSTEAD)
    from moesaic.kernels.triton.float8.training import HopperFloat8  # Triton, which is on machines with a GPU

    return HopperFloat8()


def check(config: ModelConfig, device: torch.device) -> None:
    """Before anything is made: whether the matmuls of such a model can be in float8 here."""
    matmuls(device)
    for layer in config.layers:
        if not isinstance(layer.ffn, Experts):
            continue
        if config.hidden % WHOLE or layer.ffn.hidden % WHOLE:
            sides = f"{config.hidden} x {layer.ffn.hidden}"
            raise UserError(PLACE, f"experts in fp8 have sides that are multiples of {WHOLE}, not {sides}", INSTEAD)
        if config.activation != "silu" or layer.ffn.bias:
            raise UserError(PLACE, "experts in fp8 have SwiGLU (silu) and no biases", INSTEAD)


def multiply_in_float8(model: Model) -> None:
    """From now on."""
    model.ops = cast(Kernels, Float8Kernels(model.ops, matmuls(model.device)))
