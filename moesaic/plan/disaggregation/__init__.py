"""Attention and experts on separate devices: MegaScale-Infer for decoding, DisagMoE for training."""
