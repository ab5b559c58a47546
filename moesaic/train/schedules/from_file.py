"""The learning rates of a schedule file, such as `moesaic law optimize` writes.

    moesaic train recipes/tiny.yaml --out out/run "schedule={name: from_file, path: schedule.json}"

The file is a JSON object with `factors`, one share of the peak for each step after warm-up; or with `learning_rates`,
one for each such step, which are divided by the object's `peak` (by the greatest of them where it names none). The run
must have as many steps after warm-up as the file, unless `interpolate` is true: then the curve is stretched to the run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.train.schedules import Schedule


@dataclass(frozen=True)
class FromFile(Schedule):
    path: str
    interpolate: bool = False
    factors: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", read_factors(self.path))

    def factor(self, step: int, steps: int) -> float:
        assert 0 <= step <= steps and steps > 0, f"step {step} of {steps}"
        length = len(self.factors)
        if steps == length:
            return self.factors[min(step, steps - 1)]
        if not self.interpolate:
            raise UserError(
                self.path,
                f"holds {length:,} steps, and the run has {steps:,} after warm-up",
                "Make one for this run with moesaic law optimize, or stretch this one with interpolate: true.",
            )
        # The first and the last step of the file are those of the run.
        place = min(step, steps - 1) / max(steps - 1, 1) * (length - 1)
        low = min(int(place), max(length - 2, 0))
        part = place - low
        return self.factors[low] * (1 - part) + self.factors[min(low + 1, length - 1)] * part


def read_factors(path: str) -> tuple[float, ...]:
    try:
        content = read_json(Path(path), "moesaic law optimize writes a schedule file.")
    except UserError as error:  # as whatever else is wrong with an option
        raise ValueError(str(error)) from None
    if ("factors" in content) == ("learning_rates" in content):
        raise ValueError(f"{path}: a schedule file is a JSON object with factors or with learning_rates")
    name = "factors" if "factors" in content else "learning_rates"
    values = content[name]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path}: {name} must be a list of numbers")
    for step, value in enumerate(values):
        if not _number(value) or not value >= 0:
            raise ValueError(f"{path}: {name}: step {step} is {json.dumps(value)}, not a number from 0 up")
    peak = 1.0 if name == "factors" else content.get("peak", max(values))
    if not _number(peak) or not peak > 0:
        raise ValueError(f"{path}: the peak is {json.dumps(peak)}, not a number above 0")
    if max(values) > peak * (1 + 1e-9):
        raise ValueError(f"{path}: {name} rise to {max(values):g}, above the peak of {peak:g}")
    return tuple(min(1.0, float(value) / peak) for value in values)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
