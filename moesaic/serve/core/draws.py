"""Random numbers that are fixed by a request's seed and the place of a token: there is no state to carry along."""

from __future__ import annotations

import hashlib
import struct

TOKEN, XTC = 0, 1  # what is drawn


def draw(seed: int, place: int, what: int = TOKEN) -> float:
    """A number in [0, 1) that is fixed by seed and place."""
    numbers = struct.pack("<qq", seed, place) if what == TOKEN else struct.pack("<qqq", seed, place, what)
    digest = hashlib.blake2b(numbers, digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) / 2**53)
