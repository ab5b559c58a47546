"""Clocks, power and latency: what VoltanaLLM's control of frequencies saves."""
