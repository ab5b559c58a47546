"""JSON and JSON lines: records with a text and perhaps a title, each a document of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from moesaic.know.documents.document import Document, Raw, Unreadable
from moesaic.know.documents.plain import clean, decoded

TEXTS = ("text", "contents", "content", "body")
TITLES = ("title", "name")
NAMES = ("url", "id", "_id")


def read(raw: Raw) -> list[Document]:
    """One record, or a list of them."""
    try:
        content = json.loads(decoded(raw.bytes))
    except ValueError as error:
        raise Unreadable(f"is not JSON ({error})") from None
    records = list(enumerate(content, 1)) if isinstance(content, list) else [(1, content)]
    return list(_documents(raw, records, many=isinstance(content, list)))


def read_lines(raw: Raw) -> list[Document]:
    records: list[tuple[int, Any]] = []
    for number, line in enumerate(decoded(raw.bytes).split("\n"), 1):
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except (ValueError, RecursionError):
                raw.skip(f" line {number}", "is not JSON")
    return list(_documents(raw, records, many=True))


def _documents(raw: Raw, records: list[tuple[int, Any]], many: bool) -> Iterator[Document]:
    for number, record in records:
        text = _first(record, TEXTS)
        if text is None or not text.strip():
            raw.skip(f" record {number}", f"has no {TEXTS[0]}")
            continue
        named = _first(record, NAMES) or str(number)
        title = " ".join((_first(record, TITLES) or "").split())
        yield Document(f"{raw.source}#{named}" if many else raw.source, title or raw.name, text)


def _first(record: Any, keys: tuple[str, ...]) -> str | None:
    """What the first of the keys says; half a character, which JSON can spell, is none."""
    if not isinstance(record, dict):
        return None
    found = next((record[key] for key in keys if isinstance(record.get(key), str | int)), None)
    return None if found is None else clean(str(found).encode("utf-8", "replace").decode())
