"""The cheapest choice for every matrix within budgets of bytes and of time: a knapsack with groups, by HiGHS."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from moesaic.errors import UserError


@dataclass(frozen=True)
class Option:
    """One way to keep a matrix: what it costs in loss, its bits on disk, and its time as a share of float32's."""

    cost: float
    bits: float
    time: float = 0.0


@dataclass
class Budget:
    bits: float = 0.0
    time: float = field(default=float("inf"))


def choose(options: dict[str, list[Option]], budget: Budget) -> dict[str, int]:
    """For each name the number of its option, with the least cost of all that fit."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    flat = [(row, option) for row, several in enumerate(options.values()) for option in several]
    rows, places = np.array([row for row, _ in flat]), np.arange(len(flat))
    costs = np.array([option.cost for _, option in flat])
    one_each = coo_array((np.ones(len(flat)), (rows, places))).tocsr()
    limits = [LinearConstraint(one_each, 1, 1)]
    spent = [(np.array([option.bits for _, option in flat]), budget.bits)]
    if np.isfinite(budget.time):
        spent.append((np.array([option.time for _, option in flat]), budget.time))
    limits += [LinearConstraint(amounts[None] / most, -np.inf, 1 + 1e-9) for amounts, most in spent]
    with _silent():
        found = milp(
            costs / max(float(np.abs(costs).max()), 1e-30),
            constraints=limits,
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            options={"time_limit": 60, "mip_rel_gap": 1e-4},
        )
    if found.x is None:
        raise UserError("bits", "no plan of this target fits the budget", "Allow more bits, or ask for less speed.")
    chosen: dict[str, int] = {}
    start = 0
    for name, several in options.items():
        chosen[name] = int(found.x[start : start + len(several)].argmax())
        start += len(several)
    return chosen


@contextmanager
def _silent() -> Iterator[None]:
    """HiGHS leaves a line of its own on stdout now and then, where `--json` promises one object: to stderr with it."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
