"""The name of a page: a hash of whose it is and of all tokens up to its end, the same in every process.

    names = PageNames(weights)          what keys and values depend on beside tokens: `identity.py`
    name = names.root((salt, adapter, version))
    for tokens in pages: name = page_name(name, tokens)

Whoever does not know the salt cannot make the name. Weights that changed since they were loaded, and adapters that no
file holds, are known to this process alone, and so are the names of their pages.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from moesaic.serve.core.adapters import Adapter

NAME_BYTES = 20


class PageNames:
    def __init__(self, weights: str) -> None:
        self.weights = weights
        self._own = os.urandom(16).hex()
        self._roots: dict[Hashable, bytes] = {}

    def root(self, root: Hashable) -> bytes:
        """The name above the first page of a tree; its root is a salt, an adapter and the version of the weights."""
        if root not in self._roots:
            salt, adapter, version = cast("tuple[str, Adapter | None, int]", root)
            parts = [self.weights, salt, ""]
            if adapter is not None:  # whatever it is called
                parts[2] = adapter.digest or f"{self._own}/{id(adapter)}"
            if version:
                parts.append(f"{self._own}/{version}")
            if len(self._roots) > 4096:  # salts come and go
                self._roots.clear()
            self._roots[root] = digest(*(part.encode() for part in parts))
        return self._roots[root]

    def of_prompt(self, root: Hashable, tokens: Sequence[int], size: int) -> Iterator[bytes]:
        """The names of all pages that a sequence fills."""
        name = self.root(root)
        for start in range(0, len(tokens) - size + 1, size):
            name = page_name(name, tokens[start : start + size])
            yield name


def page_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    return digest(parent, array("q", tokens).tobytes())


def digest(*parts: bytes) -> bytes:
    """Of parts whose lengths count: no two lists of parts are the same bytes."""
    whole = hashlib.blake2b(digest_size=NAME_BYTES)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()
