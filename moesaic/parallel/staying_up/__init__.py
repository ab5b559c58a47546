"""Staying up: who is stuck, what a restart resumes from, copies in a neighbour's memory, and what makes a step slow."""
