"""Training: the time and memory of a step under a layout, the search for the best, published runs to compare with."""
