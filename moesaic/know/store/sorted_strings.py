"""Strings in the order of their bytes, in a file that is searched where it lies: opening it costs nothing."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np


def mapped(file: Path) -> mmap.mmap | bytes:
    """The bytes of a file, read where they lie."""
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""


def write(folder: Path, name: str, strings: Sequence[bytes]) -> None:
    """`strings` are in order."""
    (folder / f"{name}.utf8").write_bytes(b"".join(strings))
    np.save(folder / f"{name}_ends.npy", np.cumsum([0, *map(len, strings)]).astype(np.int64))


class SortedStrings:
    def __init__(self, folder: Path, name: str) -> None:
        self._ends = np.asarray(np.load(folder / f"{name}_ends.npy", mmap_mode="r"))  # a plain array is indexed faster
        self._bytes = mapped(folder / f"{name}.utf8")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> bytes:
        return self._bytes[self._ends[number] : self._ends[number + 1]]

    def __iter__(self) -> Iterator[str]:
        raw = self._bytes[:]
        return (raw[begin:end].decode() for begin, end in pairwise(self._ends.tolist()))

    def first_from(self, string: bytes) -> int:
        """Number of the first that is not before `string`."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self[middle] < string else (low, middle)
        return low

    def find(self, string: bytes) -> int | None:
        number = self.first_from(string)
        return number if number < len(self) and self[number] == string else None
