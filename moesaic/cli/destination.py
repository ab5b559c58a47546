"""Where a command writes: a directory or a file, refused before any work is done if it cannot be one."""

from __future__ import annotations

from pathlib import Path

from moesaic.errors import UserError


def directory(text: str | Path) -> Path:
    """There or not yet; but nothing is written to where nobody said."""
    path = _named(text, "directory")
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise UserError(place, "is a file", "Name a directory.")
    return path


def file(text: str | Path) -> Path:
    path = _named(text, "file")
    if path.is_dir():
        raise UserError(path, "is a directory", "Name a file.")
    directory(path.parent)
    return path


def _named(text: str | Path, kind: str) -> Path:
    if not str(text).strip():
        raise UserError("command line", f"the name of a {kind} is empty", f"Name a {kind}.")
    return Path(text)
