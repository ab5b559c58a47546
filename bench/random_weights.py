"""Models with random weights, made where they run and in the type that their config names: what costs of kernels and
memory are measured with, which ask nothing of what a model has learned."""

from __future__ import annotations

import torch

from moesaic.model.config import ModelConfig
from moesaic.model.transformer import Model


def random_model(config: ModelConfig, device: torch.device | str = "cuda", seed: int = 0) -> Model:
    """Matrices are drawn, norms are 1 and biases 0."""
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, config.dtype))
        with torch.device(device):
            model = Model(config)
    finally:
        torch.set_default_dtype(usual)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(float("bias" not in name))
    return model
