"""Alignment: supervised fine-tuning, preferences and reinforcement learning on the very model the engine serves."""
