"""Serve a model in float8 (W8A8): weights rounded by blocks when it is loaded, inputs by groups in every step.

    moesaic.load(path, device="cuda"), then round_to_float8(model)

A checkpoint that was released in float8 gets back the numbers it was released with: what was read of it as bfloat16 is
nearer to them than to any others.
"""

from __future__ import annotations

import torch

from moesaic.errors import UserError
from moesaic.model.directory import install
from moesaic.model.transformer import Model

# Plain: what chooses experts or keys, what experts are mixed by, and what latents are expanded by (queries absorb it).
LEFT = {"router", "indexer", "residual", "kv_up"}


@torch.no_grad()
def round_to_float8(model: Model) -> None:
    """All matrices of attention and feed-forward layers."""
    if model.device.type != "cuda" or torch.cuda.get_device_capability(model.device) < (9, 0):
        raise UserError("float8", "needs a GPU with float8 tensor cores (Hopper or later)", "Leave it out.")
    if model.quantized:
        raise UserError("float8", "the model is quantized already", "Leave it out.")
    from moesaic.kernels.triton.float8.weight import Float8Weight  # Triton, which is on machines with a GPU

    for name, weight in list(model.named_parameters()):
        if weight.dim() > 1 and name.startswith("layers.") and not LEFT & set(name.split(".")):
            install(model, name, Float8Weight.rounded(weight), weight.dtype)
    model.weights_replaced()
