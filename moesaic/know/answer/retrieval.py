"""A knowledge base searched by one of its methods, wherever a retriever is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moesaic.know.chunk import Hit


class ManyMethods(Protocol):
    def search(self, query: str, k: int = 8, method: str = "auto") -> list[Hit]: ...


@dataclass(frozen=True)
class ByMethod:
    base: ManyMethods
    method: str = "auto"

    def search(self, query: str, k: int = 8) -> list[Hit]:
        return self.base.search(query, k, self.method)
