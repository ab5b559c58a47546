"""Checkpoint formats: safetensors directories, and weights quantized in our layout or in others'."""
