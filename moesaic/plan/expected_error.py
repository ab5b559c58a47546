"""How wrong the planner has been on published runs of the same kind: the error that nine of ten of them stayed within."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from moesaic.plan.hardware import Device
from moesaic.plan.published import PublishedRun, published_runs
from moesaic.plan.shape import ModelShape
from moesaic.plan.training import step_time

FEWEST = 6  # runs of a kind below which a wider kind is asked
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
    mixture = bool(model.experts)
    generation = GENERATIONS.get(device.name)
    what = "mixtures" if mixture else "dense models"
    near = [
        (f"{what} on {device.name.upper()}", [e for run, e in errors() if run.cluster.device.name == device.name and bool(run.model.experts) == mixture]),
        (f"{what} on {generation} devices", [e for run, e in errors() if GENERATIONS.get(run.cluster.device.name) == generation and bool(run.model.experts) == mixture]),
        (f"{what} on any device", [e for run, e in errors() if bool(run.model.experts) == mixture]),
    ]  # fmt: skip
    kind, found = next((kind, found) for kind, found in near if len(found) >= FEWEST or kind.endswith("any device"))
    ranked = sorted(abs(error) for error in found)
    # The smallest bound that at least 90 % of the runs lie within.
    return ExpectedError(ranked[math.ceil(0.9 * len(ranked)) - 1], ranked[len(ranked) // 2], len(ranked), kind)
