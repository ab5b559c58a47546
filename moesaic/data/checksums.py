"""Whether a file of prepared data is the one that was written."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
