"""Many devices: how a model and its work are divided among ranks, from outside the model.

`moesaic.parallel.ExpertParallel` is the drop-in for other models (experts/drop_in.py).
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ExpertParallel":  # torch comes with it, which a plan does without
        from moesaic.parallel.experts.drop_in import ExpertParallel

        return ExpertParallel
    raise AttributeError(name)
