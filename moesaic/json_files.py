"""One JSON object in a file: whatever is wrong with it is a UserError that names the file and what to do."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.units import readable_bytes

MAX_BYTES = 256 * 2**20


def read_json(file: Path, remedy: str = "Copy the file again.", missing: str | None = None) -> dict[str, Any]:
    """The object in a file. `remedy` is for what is not one, `missing` for a file that is not there."""
    raw = read_bytes(file)
    if raw is None:
        problem = "is not a file" if os.path.exists(file) else "no such file"
        raise UserError(file, problem, remedy if missing is None else missing)
    try:
        content = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise UserError(file, "is not UTF-8 text", remedy) from None
    except (ValueError, RecursionError) as error:
        raise UserError(file, f"is not JSON ({error})", remedy) from None
    if not isinstance(content, dict):
        raise UserError(file, f"holds a {type(content).__name__}, not a JSON object", remedy)
    return content


def object_or_empty(raw: bytes | None) -> dict[str, Any]:
    """The object in a file that a model or a machine can do without: what is none counts for nothing."""
    try:
        content = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_file(path: Path) -> bool:
    """Whether there is a regular file; what cannot be looked at counts as one, so that reading it says why."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def read_bytes(file: Path) -> bytes | None:
    """A whole file, or None if there is none."""
    if not is_file(file):
        return None
    try:
        size = os.stat(file).st_size
        if size > MAX_BYTES:
            raise UserError(file, f"is too large ({readable_bytes(size)})", "Is it the right file?")
        return file.read_bytes()
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})", "Check its permissions.") from None
