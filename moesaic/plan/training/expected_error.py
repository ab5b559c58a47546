"""How wrong the planner has been on published runs of the same kind: the error that nine of ten stayed within."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from moesaic.plan.hardware import Device
from moesaic.plan.shape import ModelShape
from moesaic.plan.training.published import PublishedRun, published_runs
from moesaic.plan.training.step_time import step_time

FEWEST = 6  # runs of a kind below which a wider kind is asked
UNKNOWN = 0.5  # stated for devices no published run is known of
# Kinds that share a generation: what is known of one says something of the other.
GENERATIONS = {
    "a100": "ampere", "h100": "hopper", "h200": "hopper", "h800": "hopper",
    "b200": "blackwell", "b300": "blackwell", "gb200": "blackwell", "gb300": "blackwell",
}  # fmt: skip


@dataclass(frozen=True)
class ExpectedError:
    share: float  # relative error of step time that 90 % of these runs stayed within
    median: float
    runs: int
    kind: str


@cache
def errors() -> tuple[tuple[PublishedRun, float], ...]:
    """Every published run with the relative error of its predicted step time."""
    return tuple(
        (run, step_time(run.model, run.cluster, run.layout, run.work).seconds / run.seconds - 1)
        for run in published_runs()
    )


def expected_error(model: ModelShape, device: Device) -> ExpectedError:
    what = "mixtures" if model.experts else "dense models"
    generation = GENERATIONS.get(device.name, device.name)
    alike = [
        (run.cluster.device.name, error) for run, error in errors() if bool(run.model.experts) == bool(model.experts)
    ]
    near = [
        (f"{what} on {device.name.upper()}", [error for name, error in alike if name == device.name]),
        (f"{what} on {generation} devices", [error for name, error in alike if GENERATIONS.get(name) == generation]),
        (f"{what} on any device", [error for _, error in alike]),
    ]
    kind, found = next((kind, found) for kind, found in near if len(found) >= FEWEST or kind.endswith("any device"))
    ranked = sorted(abs(error) for error in found)
    if generation not in GENERATIONS.values():  # what is known of other devices says little of this one
        return ExpectedError(
            max(UNKNOWN, ranked[-1]), ranked[len(ranked) // 2], len(ranked), f"{what} on other devices"
        )
    # The smallest bound that at least 90 % of the runs lie within.
    return ExpectedError(ranked[math.ceil(0.9 * len(ranked)) - 1], ranked[len(ranked) // 2], len(ranked), kind)
