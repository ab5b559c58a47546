"""Files of JSON lines: whatever is wrong with a line is told with its place, file:line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.errors import UserError


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a file with its place; a file without one is refused."""
    try:
        # Not splitlines: a text within JSON may hold other line ends than this one.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", "Name a file of JSON lines.") from None
    except UnicodeDecodeError:
        raise UserError(path, "is not text", "Name a file of JSON lines.") from None
    empty = True
    for number, line in enumerate(lines, 1):
        if line.strip():
            empty = False
            yield f"{path}:{number}", _read(line, f"{path}:{number}")
    if empty:
        raise UserError(path, "is empty", "Write one object on each line.")


def _read(line: str, place: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(place, "is not JSON", "Write one object on each line.") from None
    if not isinstance(content, dict):
        raise UserError(place, "is not a JSON object", "Write one object on each line.")
    # What is not Unicode can only come from an escape.
    if "\\ud" in line.lower() and not is_unicode(json.dumps(content, ensure_ascii=False)):
        raise UserError(place, "is not Unicode (it holds half of a surrogate pair)", "Correct it.")
    return content


def is_unicode(text: str) -> bool:
    """Half of a surrogate pair, which an escape in JSON can spell, is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
