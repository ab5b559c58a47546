"""Which field of a request is wrong, by the name the client gave it, and what is wrong with it, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from moesaic.strict import EXPECTED, either, sentence

# Kinds of problem that say nothing about a value but that it is none of what it might be.
UNFIT = {*EXPECTED, "missing", "literal_error", "union_tag_invalid", "union_tag_not_found"}


def wrong_field(problems: Sequence[Any], body: Any) -> tuple[str, str, str]:
    """The field, what is wrong with it, and the code of the error.

    Where a field may have one of several types, each reports why it did not fit. One that a value fitted but for its
    bounds says most; otherwise the one that got furthest into the value does.
    """
    if problems[0]["type"] == "json_invalid":
        return "", f"the body is not JSON ({problems[0].get('ctx', {}).get('error', '')})", "invalid_json"
    if not isinstance(body, dict) and problems[0]["loc"][:1] == ("body",):
        return "", "the body must be a JSON object, sent with Content-Type: application/json", "invalid_type"
    paths = [_path(problem, body) for problem in problems]
    _, best = max(zip(problems, paths), key=lambda each: (each[0]["type"] not in UNFIT, len(each[1])))
    own = [problem for problem, path in zip(problems, paths) if path == best]
    chosen = next((problem for problem in own if problem["type"] not in UNFIT), None)
    chosen = chosen or next((problem for problem in own if problem["type"] not in EXPECTED), None)
    chosen = chosen or reduce(either, {EXPECTED[problem["type"]]: problem for problem in own}.values())
    code = "missing_required_parameter" if chosen["type"] == "missing" else "invalid_value"
    return ".".join(best), sentence(chosen), code


def _path(problem: Any, body: Any) -> tuple[str, ...]:
    """Where in the body a problem is, without the names of types that were tried there."""
    location = problem["loc"]
    if location[0] != "body":
        return tuple(str(part) for part in location)
    found: list[str] = []
    at = body
    for part in location[1:]:
        if part in (range(len(at)) if isinstance(at, list) else at if isinstance(at, dict) else ()):
            at = at[part]
            found.append(str(part))
    match problem["type"]:
        case "missing":
            found.append(str(location[-1]))
        case "union_tag_invalid" | "union_tag_not_found":
            found.append("type")
    return tuple(found)
