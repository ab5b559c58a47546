"""A model directory made smaller: fewer bits per weight, fewer weights, or fewer layers.

compress.py                 what `moesaic compress` does: check, run a method, write, measure, report
methods/                    one file each; most compress one matrix at a time
layerwise.py                the run over the layers, one in memory at a time, that those share
calibration_statistics.py   the inputs of each matrix while the calibration text is read
saliency.py, sensitivity.py how much an error at each token, and in each matrix, matters
grid.py, gptq_rounding.py   rounding weights to integer codes
layer_store.py              finished layers on disk, so that a killed run resumes
"""
