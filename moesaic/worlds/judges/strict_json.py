"""Whether a text is JSON, as the standard has it and not as Python reads it."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def strict_json(text: str) -> Any:
    """As the standard has it: no NaN, no Infinity, no key twice."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) != len(dict(pairs)):
            raise ValueError("a key stands twice")
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
