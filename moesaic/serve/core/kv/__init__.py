"""Requests whose KV cache is pruned, merged or quantized: compact sequences inside the engine's own pages."""
