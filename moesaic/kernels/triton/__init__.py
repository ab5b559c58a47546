"""GPU kernels in Triton. They need torch and triton alone and know nothing of models."""

from moesaic.kernels.triton.layer import experts

__all__ = ["experts"]
