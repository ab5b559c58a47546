"""Pages on disk, a file each: as many as fit in so many bytes, the least recently used go first.

A file is written beside its name and then renamed; it begins with its kind, its own name, its length and a checksum. So
one that was cut off, damaged, put there by somebody else or written for another page is not taken for a page: it counts
as missing. Nothing in it is ever run. Files of before are used again after a restart.

Each engine has a folder of its own in the cache's directory, which it locks: several may share the directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.serve.pages.names import NAME_BYTES

KIND = b"moesaic\x01"
HEADER = struct.Struct(f"<8s{NAME_BYTES}sQ32s")  # kind, name, bytes, checksum
FILE = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}\.page")
MAX_ENGINES = 1024  # that share a directory


class DiskTier:
    """Used by several threads."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.folder, self._file = _own_folder(directory)
        self.sizes: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self.bytes = 0
        self.damaged = 0  # files that were no pages
        self._lock = threading.Lock()
        for _, size, path in sorted(self._files()):
            self.sizes[bytes.fromhex(path.stem)] = size
            self.bytes += size
        self._make_room(0)

    def __contains__(self, name: bytes) -> bool:
        return name in self.sizes

    def put(self, name: bytes, data: Tensor) -> bool:
        """False where it cannot be written."""
        if name in self.sizes:
            self._touch(name)
            return True
        size = HEADER.size + data.nbytes
        if size > self.max_bytes:
            return False
        content = data.contiguous().view(-1).numpy()
        path = self._path(name)
        fresh = path.with_suffix(".writing")
        with self._lock:
            self._make_room(size)
            self.sizes[name] = size  # before it is there, so that the bound holds at any time
            self.bytes += size
        try:
            path.parent.mkdir(exist_ok=True)
            with fresh.open("wb", buffering=0) as file:
                file.write(HEADER.pack(KIND, name, data.nbytes, _checksum(name, content)))
                file.write(content.data)
            os.replace(fresh, path)
        except OSError:  # the disk is full, or gone: slower, not wrong
            fresh.unlink(missing_ok=True)
            self._forget(name)
            return False
        return True

    def get(self, name: bytes, size: int) -> Tensor | None:
        """A page of so many bytes, if that is what the file holds."""
        if name not in self.sizes:
            return None
        try:
            with self._path(name).open("rb", buffering=0) as file:
                kind, own, length, checksum = HEADER.unpack(file.read(HEADER.size))
                content = torch.empty(size, dtype=torch.uint8)
                whole = length == size and file.readinto(content.numpy().data) == size and not file.read(1)
                if kind == KIND and own == name and whole and checksum == _checksum(name, content.numpy()):
                    self._touch(name)
                    return content
        except FileNotFoundError:  # evicted meanwhile
            return None
        except (OSError, struct.error):
            pass
        self.damaged += 1
        self._forget(name)
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)
        return None

    def close(self) -> None:
        os.close(self._file)

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}.page"

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                if path.suffix == ".writing" and FILE.fullmatch(path.with_suffix(".page").name):
                    path.unlink()
                elif FILE.fullmatch(path.name) and path.is_file() and path.parent.name == path.name[:2]:
                    found = path.stat()
                    yield found.st_mtime, found.st_size, path

    def _touch(self, name: bytes) -> None:
        with self._lock:
            if name in self.sizes:
                self.sizes.move_to_end(name)
        with suppress(OSError):
            os.utime(self._path(name))

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self.bytes -= self.sizes.pop(name, 0)

    def _make_room(self, size: int) -> None:
        while self.bytes + size > self.max_bytes and self.sizes:
            name, old = self.sizes.popitem(last=False)
            self.bytes -= old
            with suppress(OSError):
                self._path(name).unlink(missing_ok=True)


def _checksum(name: bytes, content: object) -> bytes:
    whole = hashlib.blake2b(name, digest_size=32)
    whole.update(content)  # type: ignore[arg-type]
    return whole.digest()


def _own_folder(directory: Path) -> tuple[Path, int]:
    """The first folder that no other engine holds; its lock goes with the process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(MAX_ENGINES):
            folder = directory / f"engine-{number}"
            folder.mkdir(exist_ok=True)
            file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return folder, file
            except BlockingIOError:
                os.close(file)
    except OSError as error:
        raise UserError("--cache-dir", f"{directory} cannot be used ({error.strerror or error})") from None
    raise UserError("--cache-dir", f"{directory} is used by {MAX_ENGINES} engines", "Name another.")
