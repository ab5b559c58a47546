"""Rollouts: completions sampled from the engine that holds the trainer's weights, here or in workers on Ray."""
