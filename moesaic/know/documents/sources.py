"""The files below what is to be indexed: in a fixed order, never outside of it, regular files alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.errors import UserError
from moesaic.know.documents.document import Skipped, Unreadable
from moesaic.units import readable_bytes

MAX_FILE = 256 * 2**20  # bytes


@dataclass(frozen=True)
class SourceFile:
    path: Path  # absolute, without links: its place in a knowledge base
    source: str  # what a reader knows it by
    size: int


def files_below(paths: Sequence[Path], but: Path | None = None) -> tuple[list[SourceFile], list[Skipped]]:
    """All files, each once, in the order of their names, and what was left out. Names that begin with a dot are, and
    what lies below `but`."""
    without = None if but is None else but.resolve()
    found: dict[Path, SourceFile] = {}
    skipped: list[Skipped] = []
    for path in paths:
        try:
            root = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise UserError(path, "no such file or directory", "Name a file or a folder of texts.") from None
        for entry in _walk(root, root.name, root, skipped) if root.is_dir() else _one(root, root.name, root, skipped):
            if without is None or not entry.path.is_relative_to(without):
                found.setdefault(entry.path, entry)
    return list(found.values()), skipped


def read_file(file: SourceFile) -> bytes:
    try:
        # Never through a link that took the file's place since, and never waiting for a pipe.
        handle = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as opened:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("is not a regular file")
            if status.st_size > MAX_FILE:
                raise Unreadable(f"is too large ({readable_bytes(status.st_size)}, at most {readable_bytes(MAX_FILE)})")
            return opened.read(MAX_FILE + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None


def _walk(folder: Path, source: str, root: Path, skipped: list[Skipped]) -> Iterator[SourceFile]:
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        skipped.append(Skipped(source, f"cannot be read ({error.strerror})"))
        return
    for name in names:
        path, place = folder / name, f"{source}/{_printable(name)}"
        if not path.is_symlink() and path.is_dir():
            yield from _walk(path, place, root, skipped)
        else:
            yield from _one(path, place, root, skipped)


def _one(path: Path, source: str, root: Path, skipped: list[Skipped]) -> Iterator[SourceFile]:
    try:
        if path.is_symlink():
            # What it leads to inside is found under its own name.
            if not Path(os.path.realpath(path)).is_relative_to(root):
                skipped.append(Skipped(source, "is a link that leads out of the folder"))
            return
        status = path.lstat()
    except OSError as error:
        skipped.append(Skipped(source, f"cannot be read ({error.strerror})"))
        return
    if not stat.S_ISREG(status.st_mode):
        skipped.append(Skipped(source, "is not a regular file"))
    else:
        yield SourceFile(path, source, status.st_size)


def _printable(name: str) -> str:
    """Names need not be Unicode; what is shown and stored must be."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
