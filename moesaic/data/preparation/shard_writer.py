"""Write token shards so that a process killed at any moment can resume without a trace.

Files only ever grow. `state()` says how long each is, after everything up to there has reached the disk; a writer made
from a state truncates the files to it and continues. Nothing reads the shards before the manifest names them, and that
is written last, so no half-written shard is ever seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.data.checksums import checksum
from moesaic.data.shards import row_type, shard_files, token_type
from moesaic.errors import UserError


class GrowingFile:
    """A file that is appended to, and truncated to a known length when it is opened again."""

    def __init__(self, path: Path, size: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        if size and (not path.is_file() or path.stat().st_size < size):
            raise UserError(path, "has lost what was written to it", "Remove the directory and prepare again.")
        self.file = path.open("r+b" if size else "wb")
        self.file.truncate(size)
        self.file.seek(size)
        self.size = size

    def append(self, content: bytes) -> None:
        self.file.write(content)
        self.size += len(content)

    def sync(self) -> int:
        """Flush everything appended so far to disk; returns the length."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.size

    def close(self) -> None:
        self.file.close()


class ShardWriter:
    """Appends documents, and begins a new shard at the document after `shard_tokens` tokens."""

    def __init__(
        self,
        directory: Path,
        vocabulary: int,
        columns: list[str],
        shard_tokens: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        state = state or {"finished": [], "tokens": 0, "documents": 0}
        self.directory = directory
        self.shard_tokens = shard_tokens
        self.type = token_type(vocabulary)
        self.row = row_type(columns)
        self.columns = columns
        self.finished: list[dict[str, Any]] = state["finished"]
        self._open(state["tokens"], state["documents"])

    def _open(self, tokens: int = 0, documents: int = 0) -> None:
        self.tokens, self.documents = tokens, documents
        token_file, document_file = shard_files(self.directory, len(self.finished))
        self._tokens = GrowingFile(token_file, tokens * self.type.itemsize)
        self._documents = GrowingFile(document_file, documents * self.row.itemsize)

    @property
    def total(self) -> int:
        """Tokens of all shards."""
        return self.tokens + sum(shard["tokens"] for shard in self.finished)

    def append(
        self, tokens: Sequence[int] | np.ndarray, domain: int, held_out: bool, columns: Mapping[str, float]
    ) -> None:
        self._tokens.append(np.asarray(tokens, self.type).tobytes())
        self.tokens += len(tokens)
        self.documents += 1
        values = (self.tokens, domain, held_out, *(columns[name] for name in self.columns))
        self._documents.append(np.array([values], self.row).tobytes())
        if self.tokens >= self.shard_tokens:
            self._finish_shard()
            self._open()

    def state(self) -> dict[str, Any]:
        """What a later writer needs to resume from here; the files are on disk up to here when this returns."""
        self._tokens.sync()
        self._documents.sync()
        return {"finished": self.finished, "tokens": self.tokens, "documents": self.documents}

    def finish(self) -> list[dict[str, Any]]:
        """End the last shard; the shards as the manifest lists them."""
        if self.documents:
            self._finish_shard()
        else:
            self.close()
            for path in shard_files(self.directory, len(self.finished)):
                path.unlink(missing_ok=True)
        return self.finished

    def close(self) -> None:
        self._tokens.close()
        self._documents.close()

    def _finish_shard(self) -> None:
        self._tokens.sync()
        self._documents.sync()
        self.close()
        sums = [checksum(path) for path in shard_files(self.directory, len(self.finished))]
        self.finished.append({"tokens": self.tokens, "documents": self.documents, "checksums": sums})
