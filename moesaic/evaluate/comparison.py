"""Numbers of several models, one column each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Results = dict[str, dict[str, dict[str, Any]]]  # model, suite, numbers


def rows(found: Results) -> list[list[str]]:
    """A row for each number, a column for each model; an interval stands behind its number."""
    listed: list[list[str]] = []
    for suite in next(iter(found.values())):
        numbers = {
            key: None
            for own in found.values()
            for key, value in own.get(suite, {}).items()
            if isinstance(value, int | float)
        }
        for key in numbers:
            if key.endswith(("_low", "_high")) and key.rpartition("_")[0] in numbers:
                continue
            listed.append([f"{suite}: {key}", *(cell(own.get(suite, {}), key) for own in found.values())])
    return listed


def cell(numbers: Mapping[str, Any], key: str) -> str:
    value = numbers.get(key)
    if not isinstance(value, int | float):
        return ""
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    low, high = numbers.get(f"{key}_low"), numbers.get(f"{key}_high")
    return f"{text} ({low:.3f} to {high:.3f})" if low is not None and high is not None else text
