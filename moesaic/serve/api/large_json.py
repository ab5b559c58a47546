"""A response with very many log-probabilities as JSON, piece by piece.

One call of an encoder would keep every other thread from running for as long as it takes, the event loop among them:
of the likeliest hundred of eight thousand tokens, a second. Meant for a thread of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, RootModel

ENCODE = json.JSONEncoder(check_circular=False, ensure_ascii=False, separators=(",", ":")).encode
SHORT = 16  # items of a list that is encoded at once


def large_json(response: BaseModel) -> bytes:
    return "".join(pieces(response)).encode()


def pieces(value: Any) -> Iterator[str]:
    """Models field by field and long lists item by item; all else is short."""
    if isinstance(value, RootModel):
        yield from pieces(value.root)
    elif isinstance(value, BaseModel):
        large = {name for name in type(value).model_fields if _has_parts(getattr(value, name))}
        head = value.model_dump(exclude=large)
        yield ENCODE(head)[:-1]
        for number, name in enumerate(sorted(large)):
            yield f"{',' if head or number else ''}{ENCODE(name)}:"
            yield from pieces(getattr(value, name))
        yield "}"
    elif _has_parts(value):
        for number, item in enumerate(value):
            yield "," if number else "["
            yield from pieces(item)
        yield "]"
    else:
        yield ENCODE(value)


def _has_parts(value: Any) -> bool:
    """Whether it is a model, or a list that is long or has models in it."""
    return isinstance(value, BaseModel) or (
        isinstance(value, list) and bool(value) and (len(value) > SHORT or isinstance(value[0], BaseModel))
    )
