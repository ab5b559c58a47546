"""What the parsers know of JSON: strict reading, safe writing, and the meaning of an argument that came as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from moesaic.json_lines import is_unicode
from moesaic.python_syntax import parse_literal
from moesaic.serve.parsers._events import Tools


def read_json(text: str) -> Any:
    """JSON's own values only, or ValueError. Control characters within strings are forgiven: models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_python(text: str) -> Any:
    """A Python literal that JSON can hold too, or ValueError."""
    try:
        value = parse_literal(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, SystemError):  # the last of deep nesting
        raise ValueError("is no literal") from None
    return value


def write_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or is_unicode(text) else json.dumps(value)


def is_name(name: object) -> bool:
    """Whether a tool could have this name."""
    return isinstance(name, str) and re.fullmatch(r"[\w.:/@-]{1,256}", name) is not None


def names_of(tools: Tools) -> set[str]:
    functions = (tool.get("function", tool) for tool in tools)
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of each of a tool's parameters; empty where nothing is known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def argument_as_json(text: str, schema: object, string: bool | None = None) -> str:
    """An argument that came without quotes, as JSON: a string where its schema has one, or the call itself says so,
    else JSON if it parses so."""
    allowed = types_of(schema)
    if string is None:
        string = "string" in allowed and not (text.strip() == "null" and "null" in allowed)
    if string:
        return write_json(text)
    try:
        return write_json(read_json(text))
    except ValueError:
        pass
    if text.strip()[:1] in ("{", "["):  # as Python writes it, in some templates
        try:
            return write_json(read_python(text.strip()))
        except ValueError:
            pass
    return write_json({"true": True, "false": False, "none": None}.get(text.strip().lower(), text))


def types_of(schema: object) -> list[object]:
    """The types that a schema allows at its top."""
    if not isinstance(schema, Mapping):
        return []
    types = schema.get("type")
    found = list(types) if isinstance(types, list) else [types]
    for branch in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(branch), list):
            found += [one.get("type") for one in several if isinstance(one, Mapping)]
    if types is None and isinstance(values := schema.get("enum"), list) and values:
        found += ["string"] if all(isinstance(value, str) for value in values) else []
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
