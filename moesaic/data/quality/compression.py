"""How much of a text is left when it is compressed: little for repetitive text, much for dense text or noise.

    data: {quality: compression}
    data: {quality: {name: compression, target: 0.45}}

Without a target denser is better. With one, nearness to it is: noise, such as encoded images, compresses worse than
any prose (English of a few kilobytes leaves about 0.4 to 0.5).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.data.quality import QualityScore
from moesaic.data.records import Document

LIMIT = 1 << 20  # bytes of a document that are looked at: the ratio hardly changes after that


@dataclass(frozen=True)
class CompressionScore(QualityScore):
    target: float | None = None
    level: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 9:
            raise ValueError(f"level is zlib's, from 1 to 9, not {self.level}")

    def score(self, documents: Sequence[Document]) -> list[float]:
        return [self._of(document.text.encode()[:LIMIT]) for document in documents]

    def _of(self, raw: bytes) -> float:
        # Above 1 for very short texts, which the format's own bytes make longer.
        ratio = min(len(zlib.compress(raw, self.level)) / max(len(raw), 1), 1.0)
        return ratio if self.target is None else -abs(ratio - self.target)
