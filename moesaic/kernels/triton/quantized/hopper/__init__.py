"""Matmuls of many rows with weights of 4 or 8 bits for Hopper: a persistent, warp-specialised kernel."""
