"""Memory, time, layout and cost of a model on a cluster, before anybody pays for one; and how wrong the answer may be.

`training/` and `serving/` estimate a given layout or search for the best one. They stand on plain data, `shape.py` (the
model) and `hardware.py` (the devices), on `cost.py` (one operation) and `collectives.py` (one message), and on
`timeline/`, which plays operations event by event. `whatif/`, `failures/`, `energy/` and `disaggregation/` answer
further questions. Nothing here imports torch but `calibrate.py` and `aiperf.py`, which measure: a plan answers in a
second.
"""
