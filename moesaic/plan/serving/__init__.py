"""Serving: latency, throughput and memory of an engine under a layout and a load, estimated or played."""
