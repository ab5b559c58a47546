"""An encoder's matrices rounded to 8 bits when it is read, to meet rows that are rounded to 8 bits as they come
(Dettmers et al., LLM.int8: one scale an output, one a row): processors multiply bytes several times as fast as floats.

model = directory.load("out/minilm")
round_matrices(model)
"""

from __future__ import annotations

from typing import cast

from torch import nn

from moesaic.kernels import native
from moesaic.kernels.grid import Grid
from moesaic.model.linear import Linear
from moesaic.model.transformer import Model

BYTES = Grid(8, 0, activation_bits=8)


def round_matrices(model: Model) -> bool:
    """Of all layers, before the model has been run. False where it would gain nothing, and nothing is changed: a model
    that writes text, a GPU, a machine without native kernels, matrices that are quantized already."""
    linears = [part for part in model.layers.modules() if isinstance(part, Linear)]
    plain = all(isinstance(linear.weight, nn.Parameter) for linear in linears)
    if model.config.encoder is None or model.device.type != "cpu" or native.kernels() is None or not plain:
        return False
    for linear in linears:
        rounded = BYTES.matrix(linear.weight.detach().float())
        del linear.weight
        linear.weight = cast(nn.Parameter, rounded)  # what `ops.linear` takes in its place
    return True
