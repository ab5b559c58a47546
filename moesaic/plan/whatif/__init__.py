"""What made a recorded run slow: replay it with each part healed, and rank the causes."""
