"""The multi-power law of loss curves: fit, predict, optimise."""
