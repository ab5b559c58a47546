"""What the OpenAPI document says beside the forms: errors, and streams."""

from __future__ import annotations

from typing import Any

from moesaic.serve.api.errors import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be answered; the error says why."},
    503: {"model": ErrorAnswer, "description": "The server is shutting down."},
}


EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}


def streams() -> Responses:
    """An answer that comes as events if `stream` is true."""
    return {200: {"content": EVENTS, "description": "The answer."}}
