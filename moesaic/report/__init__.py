"""A model's life told in pictures: one HTML file that needs nothing else."""
