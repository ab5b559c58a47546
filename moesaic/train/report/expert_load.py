"""Expert load, layer by layer: a summary every step, the whole table now and then.

Of each mixture layer: `max`, the busiest expert's tokens against the mean; `entropy` of the tokens over the experts, 1
where all get the same; `dead`, how many experts got no token in the last `dead_after` steps. A model with 90 layers of
160 experts would fill the log with 14,400 numbers a step, so the counts themselves are added up and written every
`full_every` steps (and at the first and the last), as `table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Counts = NDArray[np.int64]
Loads = Tensor | Sequence[Tensor | Sequence[int]] | Mapping[int, Tensor | Sequence[int]]


class ExpertLoad:
    def __init__(self, full_every: int = 100, dead_after: int = 100) -> None:
        self.full_every, self.dead_after = full_every, dead_after
        self._since: dict[int, Counts] = {}  # tokens of each expert since the last table, by layer
        self._idle: dict[int, Counts] = {}  # steps since each expert last got a token
        self._steps = 0  # since the last table

    def update(self, step: int, loads: Mapping[int, Counts], last: bool = False) -> dict[str, Any]:
        """The fields of this step's line, from the tokens that each expert of each layer got."""
        self._steps += 1
        for layer, counts in loads.items():
            if len(self._idle.get(layer, ())) != len(counts):
                self._since[layer], self._idle[layer] = np.zeros_like(counts), np.zeros_like(counts)
            if counts.any():  # a layer that was dropped in this step says nothing of its experts
                self._since[layer] += counts
                self._idle[layer] += 1
                self._idle[layer][counts > 0] = 0
        layers = sorted(self._idle)
        none = np.zeros(1, dtype=np.int64)
        peaks = [peak(loads.get(layer, none)) for layer in layers]
        entropies = [entropy(loads.get(layer, none)) for layer in layers]
        dead = [int((self._idle[layer] >= self.dead_after).sum()) for layer in layers]
        summary: dict[str, Any] = {"max": _rounded(peaks), "entropy": _rounded(entropies), "dead": dead}
        if step == 1 or last or step % self.full_every == 0:
            summary["layers"] = layers
            summary["table_steps"] = self._steps
            summary["table"] = [self._since[layer].tolist() for layer in layers]
            for since in self._since.values():
                since[:] = 0
            self._steps = 0
        return {
            "balance/max": max((value for value in summary["max"] if value is not None), default=None),
            "balance/entropy": _mean(entropies),
            "balance/dead": sum(dead),
            "expert_load": summary,
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on counting; plain lists and numbers."""
        return {
            "layers": list(self._idle),
            "since": [counts.tolist() for counts in self._since.values()],
            "idle": [counts.tolist() for counts in self._idle.values()],
            "steps": self._steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._since = {layer: np.array(counts, np.int64) for layer, counts in zip(state["layers"], state["since"])}
        self._idle = {layer: np.array(counts, np.int64) for layer, counts in zip(state["layers"], state["idle"])}
        self._steps = int(state["steps"])


def by_layer(loads: Loads) -> dict[int, Tensor | Sequence[int]]:
    """A layer's counts under its number; layers that come without numbers are counted from 0."""
    if isinstance(loads, Mapping):
        return dict(loads)
    return dict(enumerate(loads.unbind(0) if isinstance(loads, Tensor) else loads))


def peak(counts: Counts) -> float | None:
    """The busiest expert's tokens against the mean; None where there were none."""
    total = int(counts.sum())
    return float(counts.max()) * len(counts) / total if total else None


def entropy(counts: Counts) -> float | None:
    """Of the tokens over the experts: 1 where all get the same, 0 where one gets all."""
    total = int(counts.sum())
    if not total:
        return None
    if len(counts) == 1:
        return 1.0
    shares = counts[counts > 0] / total
    return abs(float((shares * np.log(shares)).sum() / np.log(len(counts))))


def _rounded(values: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None
