"""How good a model is: suites, one file each, over the one model and the one engine."""
