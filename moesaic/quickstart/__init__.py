"""The whole life of a tiny mixture on this machine, in minutes: what `make run` shows."""
