"""Experts divided among ranks: rows travel to the ranks of their experts and back, in an order that keeps the bits."""
