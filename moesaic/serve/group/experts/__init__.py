"""Experts in slots: read one by one from the model directory, copied and moved to where the load is."""
