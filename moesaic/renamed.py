"""Names of the last version that still work: each is taken for its new one, with a note on standard error."""

from __future__ import annotations

import sys

# Methods, by the folder of their kind.
METHODS: dict[str, dict[str, str]] = {"kv_policies": {"quantised": "quantized"}}
# Keys of a recipe, dotted.
RECIPE_KEYS: dict[str, str] = {}


def current(old: str, names: dict[str, str], what: str) -> str:
    """The name that `old` has now; `what` says where it was written."""
    new = names.get(old)
    if new is None:
        return old
    print(f"note: {what}: {old} is now called {new}; the old name works in this version only", file=sys.stderr)
    return new
