"""The directory of a knowledge base: segments that are written once, and a manifest that names those that count."""
