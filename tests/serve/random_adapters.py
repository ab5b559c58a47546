"""LoRA adapters of random numbers for any model, without the files that `peft` writes."""

from __future__ import annotations

import torch

from moesaic.model.linear import Linear
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter


def random_adapter(model: Model, name: str, rank: int, seed: int, scale: float, ends: tuple[str, ...]) -> Adapter:
    """It corrects every matrix whose path in the model ends in one of `ends`."""
    generator = torch.Generator().manual_seed(seed)
    corrections = {}
    for site, part in model.named_modules():
        if isinstance(part, Linear) and site.endswith(ends):
            outputs, inputs = part.weight.shape
            down_RI, up_OR = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
            kind = (part.weight.device, part.weight.dtype)
            corrections[site] = ((down_RI * inputs**-0.5).to(*kind), (up_OR * scale).to(*kind))
    assert corrections, "the adapter corrects something"
    return Adapter(name, corrections)
