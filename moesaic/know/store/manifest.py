"""Which segments make up a knowledge base: `manifest-N.json`, of which the highest N counts.

A build ends by renaming one file to the next number, so that a base is what it was or what it will be. A reader holds a
shared lock on the manifest it opened; what that names stays until the lock is gone, which dies with its process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from moesaic.atomic import write_json
from moesaic.errors import UserError

FORMAT = 1
_NAME = re.compile(r"manifest-(\d+)\.json")


@dataclass(frozen=True)
class Entry:
    """A segment that counts. `deleted` are the numbers of its documents that no longer do."""

    name: str
    documents: int
    chunks: int
    deleted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    number: int = 0
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each was written with, by name
    segments: tuple[Entry, ...] = ()
    embedder: dict[str, Any] = field(default_factory=dict)  # where the model of the vectors lies, and its fingerprint
    chunk_characters: int = 0


def numbers(path: Path) -> list[int]:
    """Of the manifests that are there, ascending."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", "Check its permissions.") from None
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def file_of(path: Path, number: int) -> Path:
    return path / f"manifest-{number}.json"


def read(path: Path) -> tuple[Manifest, BufferedReader]:
    """The manifest that counts, and its opened file, which is to stay open as long as the base is read."""
    while True:
        found = numbers(path)
        if not found:
            what = "is no knowledge base" if path.is_dir() else "no such knowledge base"
            raise UserError(path, what, f"Make one: moesaic know build DIR --out {path}")
        file = file_of(path, found[-1])
        try:
            opened = file.open("rb")
        except FileNotFoundError:
            continue  # a newer one took its place
        except OSError as error:
            raise UserError(file, f"cannot be read ({error.strerror})", "Check its permissions.") from None
        with suppress(OSError):  # some network file systems cannot lock
            fcntl.flock(opened, fcntl.LOCK_SH)
        if file.exists():  # else it was swept before it was locked
            return _parsed(opened.read(), file, found[-1]), opened
        opened.close()


def _parsed(raw: bytes, file: Path, number: int) -> Manifest:
    try:
        content = json.loads(raw)
        if content["format"] != FORMAT:
            remedy = "Build the base again with this version, in another directory."
            raise UserError(file, f"has format {content['format']}, and this version reads {FORMAT}", remedy)
        segments = tuple(
            Entry(entry["name"], entry["documents"], entry["chunks"], tuple(entry["deleted"]))
            for entry in content["segments"]
        )
        return Manifest(number, content["parts"], segments, content["embedder"], content["chunk_characters"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        remedy = "Build the base again, in another directory."
        raise UserError(file, "is not the manifest of a knowledge base", remedy) from None


def commit(path: Path, manifest: Manifest) -> None:
    """From here on this one counts."""
    content = {"format": FORMAT, **asdict(manifest)}
    del content["number"]
    write_json(file_of(path, manifest.number), content)


def sweep(path: Path) -> set[str]:
    """Removes manifests that no longer count and that nobody reads. Returns the segments that any left one names."""
    named: set[str] = set()
    found = numbers(path)
    for number in found:
        file = file_of(path, number)
        with suppress(FileNotFoundError), file.open("rb") as opened:
            if number != found[-1] and _free(opened):
                file.unlink()
            else:
                named |= {entry.name for entry in _parsed(opened.read(), file, number).segments}
    return named


def _free(opened: BufferedReader) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here: then readers are on their own
    return True
