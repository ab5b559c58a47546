"""Files in zip and tar archives, read without writing any: names that lead elsewhere, links and bombs are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any

from moesaic.know.documents.document import Raw, Unreadable
from moesaic.units import readable_bytes

MAX_MEMBERS = 100_000
MAX_MEMBER = 64 * 2**20  # bytes of one, unpacked
MAX_UNPACKED = 2**30  # bytes of all

Opener = Callable[[Raw], Iterator[Raw]]
_PACKED: dict[bytes, Callable[[IO[bytes]], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_BROKEN = (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError)


def zip_members(raw: Raw) -> Iterator[Raw]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(raw.bytes))
    except (zipfile.BadZipFile, *_BROKEN) as error:
        raise Unreadable(f"is not a zip archive that can be read ({error})") from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise Unreadable(f"has {len(members)} members, at most {MAX_MEMBERS}")
    left = MAX_UNPACKED
    for member in members:
        mode = member.external_attr >> 16
        if member.is_dir() or not _allowed(raw, member.filename):
            continue
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raw.skip(f"/{member.filename}", "is a link or a device")
            continue
        if member.flag_bits & 1:
            raw.skip(f"/{member.filename}", "is encrypted")
            continue
        try:
            with archive.open(member) as opened:
                content = _bounded(opened, member.filename, left)  # whatever size the archive says it has
        except (zipfile.BadZipFile, *_BROKEN) as error:
            raw.skip(f"/{member.filename}", f"cannot be unpacked ({error})")
            continue
        left -= len(content)
        yield Raw(content, f"{raw.source}/{member.filename}")


def tar_members(raw: Raw) -> Iterator[Raw]:
    unpacked = _Unpacked(raw.bytes)
    count = 0
    try:
        with tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for member in archive:
                count += 1
                if count > MAX_MEMBERS:
                    raise Unreadable(f"has more than {MAX_MEMBERS} members")
                if member.isdir() or not _allowed(raw, member.name):
                    continue
                opened = archive.extractfile(member) if member.isreg() else None
                if opened is None:
                    raw.skip(f"/{member.name}", "is a link or a device")
                    continue
                yield Raw(_bounded(opened, member.name, MAX_UNPACKED), f"{raw.source}/{member.name}")
    except (tarfile.TarError, *_BROKEN) as error:
        raise Unreadable(f"is not a tar archive that can be read ({error})") from None


def _allowed(raw: Raw, name: str) -> bool:
    """Nothing is ever written to where a name leads; but one that leads out of its archive is not to be shown."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raw.skip(f"/{_shown(name)}", "leads out of the archive")
        return False
    if not name.isprintable():
        raw.skip(f"/{_shown(name)}", "has a name that cannot be shown")
        return False
    return not any(part.startswith(".") for part in path.parts) and path.parts[:1] != ("__MACOSX",)


def _shown(name: str) -> str:
    return name.encode("utf-8", "replace").decode().encode("unicode_escape").decode()[:200]


def _bounded(opened: IO[bytes], name: str, left: int) -> bytes:
    most = min(MAX_MEMBER, left)
    content = opened.read(most + 1)
    if len(content) > most:
        raise Unreadable(f"unpacks to too much: {_shown(name)} has more than {readable_bytes(most)}")
    return content


class _Unpacked(io.RawIOBase):
    """What a tar archive unpacks to, and no more of it than is allowed."""

    def __init__(self, packed: bytes) -> None:
        opener = next((opener for mark, opener in _PACKED.items() if packed.startswith(mark)), None)
        self._file: Any = opener(io.BytesIO(packed)) if opener else io.BytesIO(packed)
        self._left = MAX_UNPACKED

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        most = self._left + 1 if size < 0 else min(size, self._left + 1)
        content = self._file.read(most)
        self._left -= len(content)
        if self._left < 0:
            raise Unreadable(f"unpacks to more than {readable_bytes(MAX_UNPACKED)}")
        return content
