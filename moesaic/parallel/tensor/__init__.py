"""Matrices divided among ranks, and rows between them too: what a rank holds, what it computes, what travels."""
