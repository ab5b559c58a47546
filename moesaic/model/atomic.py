"""Replace a whole directory at once: whoever looks sees the old one or the new one, never half, whatever is killed."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.errors import UserError

_EXCHANGE = 2  # renameat2's flag
_HERE = -100  # AT_FDCWD


@contextmanager
def replacing(target: Path, room: int) -> Iterator[Path]:
    """Yields an empty directory beside `target`; when the block ends well, it takes the target's place.

    `room` is how many bytes will be written: too little space is an error before the first one.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_dir():
        raise UserError(target, "is a file", "Name another directory.")
    _sweep(target)
    free = shutil.disk_usage(target.parent).free
    if free < room:
        from moesaic.model.checkpoint import readable

        raise UserError(
            target, f"needs {readable(room)} of disk, and {readable(free)} are free", "Free some, or write elsewhere."
        )
    fresh = target.parent / f".{target.name}.writing-{os.getpid()}"
    fresh.mkdir()
    try:
        yield fresh
        _flush(fresh)
        _swap(fresh, target)
    except OSError as error:
        raise UserError(target, f"cannot be written ({error.strerror or error})", "Nothing was changed.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def settle(target: Path) -> None:
    """Finish a replacement that was cut off between its two renames, on systems that cannot exchange directories."""
    old = target.parent / f".{target.name}.old"
    if not target.exists() and old.is_dir():
        old.rename(target)


def _swap(fresh: Path, target: Path) -> None:
    settle(target)
    if not target.exists():
        fresh.rename(target)
    elif not _exchange(fresh, target):
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    _flush_one(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0)


def _flush(directory: Path) -> None:
    for file in [*directory.rglob("*"), directory]:
        _flush_one(file)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(target: Path) -> None:
    """Remove what killed writers left, but nothing a living one is writing."""
    for stale in target.parent.glob(f".{target.name}.writing-*"):
        process = stale.name.rsplit("-", 1)[1]
        if not process.isdigit() or int(process) == os.getpid() or not Path(f"/proc/{process}").exists():
            shutil.rmtree(stale, ignore_errors=True)
