"""A model's life: which stage made it from what, with which recipe, and what was measured. Kept in moesaic.json."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from moesaic import __version__
from moesaic.errors import UserError
from moesaic.json_files import read_json

FILE = "moesaic.json"
FORMAT = 1


def read(directory: Path) -> list[dict[str, Any]]:
    """The stages so far, oldest first; none for a model from elsewhere."""
    file = directory / FILE
    if not file.is_file():
        return []
    stored = read_json(file)
    if stored.get("format", FORMAT) != FORMAT:
        raise UserError(file, f"has format {stored['format']!r}, and this version reads {FORMAT}", "Upgrade moesaic.")
    life = stored.get("life")
    if not isinstance(life, list) or any(not isinstance(stage, dict) for stage in life):
        raise UserError(file, "is not a record of a model's life", "Remove it, or copy it again.")
    return life


def stage(name: str, **facts: Any) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"stage": name, "when": when, "moesaic": __version__, **facts}


def content(life: list[dict[str, Any]]) -> dict[str, Any]:
    return {"format": FORMAT, "life": life}
