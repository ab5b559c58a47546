"""Requests whose cache is pruned, merged or kept in few bits: compact sequences inside the engine's own pages."""
