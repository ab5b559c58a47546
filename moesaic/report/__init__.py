"""A model's life as one HTML file with plots; and what `moesaic show` prints of a model."""
