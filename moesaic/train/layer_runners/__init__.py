"""How a training step runs each layer: recomputed, on some of the tokens, or dropped."""
