"""Whether two models mean the same tokens, told from process to process."""

from __future__ import annotations

import hashlib

from moesaic.model.transformer import Model


def vocabulary_hash(model: Model) -> bytes:
    """Of a tokenizer's tokens and their numbers; empty where a model has no tokenizer."""
    if model.tokenizer is None:
        return b""
    entries = sorted(model.tokenizer.fast.get_vocab().items())
    return hashlib.blake2b(repr(entries).encode(), digest_size=16).digest()
