"""JSON as its standard has it. Python's own reader also takes NaN, halves of characters and numbers beyond all bounds,
which would come back to us later, where nobody expects them."""

from __future__ import annotations

import json
import re

from pydantic_core import from_json

from moesaic.serve.api.errors import ApiError

HUGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}")


def check_json(body: bytes) -> None:
    try:
        content = from_json(body, allow_inf_nan=False)
        if HUGE.search(body):
            json.dumps(content, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON ({error})", code="invalid_json") from None
