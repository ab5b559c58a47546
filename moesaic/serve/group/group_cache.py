"""Rank 0's view of the ranks' KV caches: what is copied or moved in one happens on every rank that has the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.model.layout import PagedCache
from moesaic.serve.group.step_array import Change, Copy, Move


class GroupCache(PagedCache):
    """Rank 0's own cache; `changes` are told to the other ranks before their next step."""

    def __init__(self, changes: list[Change], *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.changes = changes

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        super().copy_rows(source, target, rows)
        self.changes.append(Copy(0, source, target, rows))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().move(sources, targets)
        self.changes.append(Move(0, tuple(sources), tuple(targets)))


class DistantCache(PagedCache):
    """The cache of another data-parallel rank, of which nothing is here."""

    def __init__(self, changes: list[Change], dp: int, like: PagedCache) -> None:
        super().__init__([], like.pages, like.page_size, next(iter(like.layers[0].values())).dtype)
        self.changes, self.dp = changes, dp

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self.changes.append(Copy(self.dp, source, target, rows))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.changes.append(Move(self.dp, tuple(sources), tuple(targets)))
