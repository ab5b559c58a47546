"""The graph of a knowledge base: what its chunks name, and how what they name is related."""
