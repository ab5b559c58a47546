"""No text is embedded twice: not by the build after one that was killed, not where a document changed in one paragraph,
not where the same passage stands in many.

A file beside the segments holds what was made since the last build that ended, which removes it: the digest of a text,
a checksum, and its vector. Those of chunks that stay in a changed document are read from their segment.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from moesaic.know.store.directory import EMBEDDED

KEY, CHECK = 16, 4  # bytes


class QueryEmbeds(Protocol):
    """An embedding model: what chunks and queries become."""

    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> np.ndarray: ...

    def embed_query(self, text: str) -> np.ndarray: ...


class Embedded:
    """An embedding model, and what it made already."""

    def __init__(self, embedder: QueryEmbeds, folder: Path, model: str) -> None:
        """`model` says which one it is: its weights, and their bits."""
        self.embedder = embedder
        self.file = folder / f"{EMBEDDED}{hashlib.sha256(model.encode()).hexdigest()[:16]}"
        self._made: dict[bytes, int] | None = None  # place in the file; None: it was not read yet
        self._stored: dict[bytes, tuple[Path, int]] = {}  # row of a segment

    @property
    def name(self) -> str:
        return self.embedder.name

    @property
    def dimensions(self) -> int:
        return self.embedder.dimensions

    def embed_query(self, text: str) -> np.ndarray:
        return self.embedder.embed_query(text)

    def remember(self, file: Path, first: int, texts: Sequence[str]) -> None:
        """That the rows of a segment's vectors from `first` on are those of `texts`."""
        self._stored |= {_key(text): (file, first + number) for number, text in enumerate(texts)}

    def begin(self, texts: Sequence[str]) -> None:
        """Before all texts of a segment. What was made of another one is in that one by now, and forgotten here."""
        made = self._read()
        if made and not any(_key(text) in made for text in texts):
            self.file.unlink()
            made.clear()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        keys, made = [_key(text) for text in texts], self._read()
        new = {key: text for key, text in zip(keys, texts) if key not in made and key not in self._stored}
        if new:
            self._append(list(new), self.embedder.embed(list(new.values())))
        out_ND = np.empty((len(texts), self.dimensions), dtype=np.float32)
        with open(self.file, "rb") if made else open(os.devnull, "rb") as file:
            for row, key in enumerate(keys):
                if key in made:
                    file.seek(made[key])
                    out_ND[row] = np.frombuffer(file.read(4 * self.dimensions), np.float32)
                else:
                    stored, number = self._stored[key]
                    out_ND[row] = np.load(stored, mmap_mode="r")[number]
        return out_ND

    def _read(self) -> dict[bytes, int]:
        """What a build that was killed left. Records that it did not write to their end count for nothing."""
        if self._made is None:
            self._made = {}
            size = KEY + CHECK + 4 * self.dimensions
            left = self.file.read_bytes() if self.file.exists() else b""
            for at in range(0, len(left) - size + 1, size):
                vector = left[at + KEY + CHECK : at + size]
                if zlib.crc32(vector) == int.from_bytes(left[at + KEY : at + KEY + CHECK], "little"):
                    self._made[left[at : at + KEY]] = at + KEY + CHECK
            if len(left) % size:
                os.truncate(self.file, len(left) - len(left) % size)
        return self._made

    def _append(self, keys: Sequence[bytes], vectors_ND: np.ndarray) -> None:
        made = self._read()
        rows = [np.ascontiguousarray(vector_D, dtype=np.float32).tobytes() for vector_D in vectors_ND]
        with self.file.open("ab") as file:
            at = file.tell()
            file.write(b"".join(key + zlib.crc32(row).to_bytes(CHECK, "little") + row for key, row in zip(keys, rows)))
        for key, row in zip(keys, rows):
            made[key] = at + KEY + CHECK
            at += KEY + CHECK + len(row)


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:KEY]
