"""Attention and experts apart (MegaScale-Infer): ranks that attend, ranks of experts, micro-batches ping-pong."""
