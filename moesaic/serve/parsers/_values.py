"""What the parsers know of JSON: strict reading, safe writing, and the meaning of an argument that came as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moesaic.json_lines import is_unicode
from moesaic.serve.parsers import Tools


def read_json(text: str) -> Any:
    """JSON's own values only, or ValueError. Control characters within strings are forgiven: models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or is_unicode(text) else json.dumps(value)


def is_name(name: object) -> bool:
    """Whether a tool could have this name."""
    return isinstance(name, str) and re.fullmatch(r"[\w.:/@-]{1,256}", name) is not None


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of each of a tool's parameters; empty where nothing is known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def argument_as_json(text: str, schema: object) -> str:
    """An argument that came without quotes, as JSON: a string where its schema has one, else JSON if it parses so."""
    types = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = types if isinstance(types, list) else [types]
    if "string" in allowed and not (text.strip() == "null" and "null" in allowed):
        return write_json(text)
    try:
        return write_json(read_json(text))
    except ValueError:
        return write_json({"true": True, "false": False, "none": None}.get(text.strip().lower(), text))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
