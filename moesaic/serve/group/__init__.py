"""A worker group: one engine over many ranks, with the tokens and the bits of one process."""
