"""Memory, time, layout and cost of a model on a cluster, before anybody pays for one; and how wrong the answer may be.

`training.py` and `serving.py` estimate a given layout, `search.py` looks for the best; both stand on `cost.py` (one
operation), `collectives.py` (one message), `memory.py`, and on plain data: `shape.py` (the model) and `hardware.py`.
Nothing here imports torch: a plan answers in a second.
"""
