"""What an earlier stage of a recipe makes: `stage:2/pairs.jsonl`, not there yet when a recipe is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAGE_OUTPUT = "stage:"  # begins such a path


def is_stage_output(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(STAGE_OUTPUT)


def names_stage_output(options: Mapping[str, Any]) -> bool:
    """Whether one of these options is such a path."""
    return any(map(is_stage_output, options.values()))
