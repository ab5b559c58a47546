"""A sequence divided among ranks: how rows that are elsewhere are attended to."""
