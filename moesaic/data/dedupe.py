"""Deduplication: drop documents equal to an earlier one, exactly (up to case and white space) or nearly.

Exact: a 128-bit hash of the normalised text; about 100 bytes of memory for each kept document. Near: MinHash over runs
of words with locality-sensitive hashing (datasketch); about 7 kB for each kept document at 128 hashes, the whole of it
in memory. The first of several is kept, in the order of the sources, so the result does not depend on chance.

The hashes are also written to a side file, from which an interrupted preparation restores its index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moesaic.data.preparation.shard_writer import GrowingFile
from moesaic.recipe_sections import DedupeSection

Verdict = Literal["new", "duplicate", "near_duplicate"]
HASH = 16  # bytes
FOUND = 0.95  # recall for pairs that are just similar enough; false candidates are compared and dropped
SCHEME: Literal["affine32"] = "affine32"  # named, so that another version of the library gives the same signatures
_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    return " ".join(text.lower().split())


@dataclass(frozen=True, slots=True)
class Keys:
    """By what a document is compared with others."""

    digest: bytes
    signature: np.ndarray | None  # where near duplicates are looked for


def keys_of(text: str, settings: DedupeSection) -> Keys | None:
    """None where nothing is compared."""
    if not (settings.exact or settings.near):
        return None
    plain = normalised(text)
    return Keys(_digest(plain), signature_of(plain, settings) if settings.near else None)


class DocumentIndex:
    """Hashes of every document kept so far. `state()` is the length of the side files that hold them."""

    def __init__(self, settings: DedupeSection, folder: Path, state: dict[str, int] | None = None) -> None:
        state = state or {"hashes": 0, "signatures": 0}
        self.settings = settings
        self._hashes = GrowingFile(folder / "seen.hashes", state["hashes"])
        self._signatures = GrowingFile(folder / "seen.signatures", state["signatures"])
        self._exact: set[bytes] = set()
        self._near = _Near(settings) if settings.near else None
        raw = self._hashes.path.read_bytes()
        self._exact.update(raw[at : at + HASH] for at in range(0, len(raw), HASH))
        if self._near is not None:
            for signature in np.fromfile(self._signatures.path, np.uint32).reshape(-1, settings.hashes):
                self._near.add(signature)

    def check(self, text: str) -> Verdict:
        """Whether a document is new; a new one is added to the index."""
        if not (self.settings.exact or self.settings.near):
            return "new"
        plain = normalised(text)
        return self._admit(_digest(plain), lambda: signature_of(plain, self.settings))

    def admit(self, keys: Keys | None) -> Verdict:
        """The same for a document that was looked at elsewhere."""
        return "new" if keys is None else self._admit(keys.digest, lambda: keys.signature)

    def _admit(self, digest: bytes, signed: Callable[[], np.ndarray | None]) -> Verdict:
        if digest in self._exact:
            return "duplicate"
        if self._near is not None:
            signature = signed()
            assert signature is not None
            if self._near.has(signature):
                return "near_duplicate"
            self._near.add(signature)
            self._signatures.append(signature.tobytes())
        self._exact.add(digest)
        self._hashes.append(digest)
        return "new"

    def state(self) -> dict[str, int]:
        return {"hashes": self._hashes.sync(), "signatures": self._signatures.sync()}

    def close(self) -> None:
        self._hashes.close()
        self._signatures.close()


class _Near:
    def __init__(self, settings: DedupeSection) -> None:
        from datasketch import MinHash, MinHashLSH

        self._make = MinHash
        self.settings = settings
        self._lsh = MinHashLSH(num_perm=settings.hashes, params=bands(settings.similarity, settings.hashes))
        self._signatures: list[np.ndarray] = []

    def has(self, signature: np.ndarray) -> bool:
        # Candidates share a band of hashes; the share of all equal hashes estimates how similar the texts are.
        limit = self.settings.similarity * len(signature)
        candidates = self._lsh.query(self._sketch(signature))
        return any(np.count_nonzero(self._signatures[number] == signature) >= limit for number in candidates)

    def add(self, signature: np.ndarray) -> None:
        self._lsh.insert(len(self._signatures), self._sketch(signature), check_duplication=False)
        self._signatures.append(signature)

    def _sketch(self, signature: np.ndarray) -> Any:
        return self._make(num_perm=self.settings.hashes, hashvalues=signature, hashfunc=_hash, scheme=SCHEME)


def signature_of(plain: str, settings: DedupeSection) -> np.ndarray:
    from datasketch import MinHash

    words = _WORD.findall(plain) or [plain]
    size = min(settings.words, len(words))
    runs = {" ".join(words[at : at + size]).encode() for at in range(len(words) - size + 1)}
    sketch = MinHash(num_perm=settings.hashes, hashfunc=_hash, scheme=SCHEME)
    sketch.update_batch(sorted(runs))
    return np.asarray(sketch.hashvalues, np.uint32)


def _digest(plain: str) -> bytes:
    return hashlib.blake2b(plain.encode(), digest_size=HASH).digest()


def bands(similarity: float, hashes: int) -> tuple[int, int]:
    """How many bands of how many hashes: as long as they can be for two texts of this similarity to share one."""
    for size in range(hashes // 2, 1, -1):
        if 1 - (1 - similarity**size) ** (hashes // size) >= FOUND:
            return hashes // size, size
    return hashes, 1


def _hash(run: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(run, digest_size=4).digest(), "little")
