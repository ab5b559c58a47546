"""How tests wait: for what they wait for, as long as a busy machine takes. A bound only ends what would never end."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 900.0  # seconds


def until(condition: Callable[[], object], what: str = "it", every: float = 0.005) -> None:
    """Wait for something that another thread or process will bring about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(every)
