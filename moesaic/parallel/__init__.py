"""Many devices: how a model and its work are divided among ranks, from outside the model."""
