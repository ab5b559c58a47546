"""GPU kernels in Triton. They need torch and triton alone and know nothing of models."""
