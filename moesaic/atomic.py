"""Replace a file or a directory at once: readers see the old one or the new one, never half, whatever is killed."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.units import readable_bytes

LOCK = ".lock"
_EXCHANGE = 2  # renameat2's flag
ATTEMPTS = 50
_HERE = -100  # AT_FDCWD


@contextmanager
def replacing(target: Path, room: int) -> Iterator[Path]:
    """Yields an empty directory beside `target`; when the block ends well, it takes the target's place.

    `room` is how many bytes will be written: too little space is an error before the first one.
    """
    target = Path(os.path.realpath(target))  # a link to a directory stays one: what it leads to is replaced
    fresh = lock = None
    try:
        if target.exists() and not target.is_dir():
            raise UserError(target, "is a file", "Name another directory.")
        _sweep(target)
        free = shutil.disk_usage(next(path for path in target.parents if path.exists())).free
        if free < room:
            needs = f"needs {readable_bytes(room)} of disk, and {readable_bytes(free)} are free"
            raise UserError(target, needs, "Free some, or write elsewhere.")
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh, lock = _start(target)
        yield fresh
        _flush(fresh)
        _swap(fresh, target)
    except OSError as error:
        raise UserError(target, f"cannot be written ({error.strerror or error})", "Nothing was changed.") from error
    finally:
        if fresh is not None and lock is not None:
            shutil.rmtree(fresh, ignore_errors=True)  # half a new directory, or the old one
            os.close(lock)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields the name of a file to write beside `path`; when the block ends well, it is flushed and takes its place."""
    fresh = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
    try:
        yield fresh
        _flush_one(fresh)
        os.replace(fresh, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        fresh.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing_file(path) as fresh:
        fresh.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_json(
    path: Path, content: Any, indent: int | None = None, default: Callable[[Any], str] | None = None
) -> None:
    write_text(path, json.dumps(content, indent=indent, default=default) + "\n")


def write_link(path: Path, target: Path | str) -> None:
    """A symbolic link to `target` in the place of whatever file or link `path` is."""
    fresh = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
    fresh.symlink_to(target)
    os.replace(fresh, path)


def sweep_files(directory: Path) -> None:
    """Remove what killed writers left of files they were replacing, where nobody else writes (`exclusive`)."""
    for left in directory.glob(".*.writing-*"):
        if left.is_symlink() or left.is_file():  # a directory may be another writer's (`_sweep`)
            left.unlink(missing_ok=True)


def refuse_to_overwrite(target: Path, source: Path | None = None) -> None:
    """A model is written over a directory whole: neither its `source` nor someone's home is to go that way."""
    if source is not None and target.resolve() == source.resolve():  # a run there would lose its checkpoints
        raise UserError(target, "is the model itself", "Name another directory.")
    if source is not None and target.resolve() in source.resolve().parents:
        raise UserError(target, f"holds {source}, which would be lost", "Name another directory.")
    for _ in range(2):  # another writer may be replacing it: what was taken away is emptied, but not there any more
        held = _names(target)
        if not held or "config.json" in held:
            return
    raise UserError(target, "holds other things than a model, which would be lost", "Name another directory.")


def _names(directory: Path) -> list[str]:
    """What is in it, at one look; nothing where it is not there."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Two processes that write one directory step by step would undo each other: the second is refused."""
    if out.exists() and not out.is_dir():
        raise UserError(out, "is a file", "Name a directory.")
    made, name = not out.exists(), out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        opened = name.open("w")
    except OSError as error:
        raise UserError(out, f"cannot be written ({error.strerror})", "Name another directory.") from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(out, "another moesaic is writing here", "Wait for it, or stop it.") from None
        except OSError:
            pass  # some network file systems cannot lock
        try:
            yield
        finally:
            if made and out.exists() and [*out.iterdir()] == [name]:  # nothing came of it
                name.unlink()
                out.rmdir()


def recover(target: Path) -> None:
    """Finish a replacement that was cut off between its two renames, on systems that cannot exchange directories."""
    with suppress(OSError, ValueError):  # whoever looks for the directory next says what is wrong
        target = Path(os.path.realpath(target))
        if not target.exists() and _old(target).is_dir():
            _old(target).rename(target)


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _start(target: Path) -> tuple[Path, int]:
    """A new directory and a lock on it, which the system lets go of when its holder dies, however it dies."""
    while True:
        fresh = target.parent / f".{target.name}.writing-{secrets.token_hex(4)}"
        fresh.mkdir()
        try:
            lock = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # someone swept it before it was locked
        with suppress(OSError):  # some network file systems cannot lock; then nobody sweeps there either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if fresh.exists():  # else the same, a moment later
            return fresh, lock
        os.close(lock)


def _sweep(target: Path) -> None:
    """Remove what killed writers left, but nothing a living one is writing."""
    recover(target)
    if target.exists():
        shutil.rmtree(_old(target), ignore_errors=True)
    for stale in glob.glob(f"{glob.escape(str(target.parent))}/.{glob.escape(target.name)}.writing-*"):
        with suppress(OSError):
            lock = os.open(stale, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(lock)


def _swap(fresh: Path, target: Path) -> None:
    with suppress(OSError):  # what was private stays private
        fresh.chmod(target.stat().st_mode | 0o700)
    if not _exchange(fresh, target):
        _rename_twice(fresh, target)
    with suppress(OSError):  # not every file system can, nor may every user
        _flush_one(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step; False if one is missing or the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0)


def _rename_twice(fresh: Path, target: Path) -> None:
    """The next best thing: between the two renames there is no directory, and `settle` puts the old one back."""
    for attempt in range(ATTEMPTS):
        try:
            if target.exists():
                shutil.rmtree(_old(target), ignore_errors=True)
                target.rename(_old(target))
            fresh.rename(target)
        except OSError:
            recover(target)
            if attempt == ATTEMPTS - 1 or not fresh.exists():
                raise
            time.sleep(0.001 * attempt)  # another writer was between the two, or a reader put the old one back: again
        else:
            break
    shutil.rmtree(_old(target), ignore_errors=True)


def _flush(directory: Path) -> None:
    for file in [*directory.rglob("*"), directory]:
        _flush_one(file)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
