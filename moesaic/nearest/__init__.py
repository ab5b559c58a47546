"""Nearest neighbours among vectors: of passages for the knowledge room, of the output matrix for a language model."""
