"""Programs that measure Moesaic beside a peer in the same run and print a table of ratios."""
