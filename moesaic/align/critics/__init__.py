"""PPO's critic: a second model with a value head, and the stream it learns from."""
