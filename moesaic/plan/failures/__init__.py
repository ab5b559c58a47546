"""Goodput of a run on machines that fail, analytic and played."""
