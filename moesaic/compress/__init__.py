"""A model directory made smaller: fewer bits a weight, fewer weights, or fewer layers.

compress.py     what `moesaic compress` does: check, run a method, write, measure, report
methods/        one file each; most look at one matrix at a time
layers.py       the walk over the layers, one in memory at a time, that those share
seen.py         what flows into each matrix while a calibration text is read
shelf.py        what is done so far, on disk, so that a killed run goes on
grid.py         rounding weights to codes
"""
