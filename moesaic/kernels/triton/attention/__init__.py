"""Attention in Triton: paged, latent (MLA), and QK norm with RoPE."""
