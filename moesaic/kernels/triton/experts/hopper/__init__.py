"""Grouped matmuls for Hopper: one persistent, warp-specialised kernel."""
