"""Layers on other ranks: which rank holds which, and the schedules by which micro-batches pass through them."""
