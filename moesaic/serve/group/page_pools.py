"""The page pools of the data-parallel ranks of a group: each has its own pages, and requests of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesaic.model.layout import PagedCache
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request
from moesaic.serve.group.group_cache import DistantCache
from moesaic.serve.group.step_array import Change


class PagePools(PagePool):
    """A request goes where most of its prefix is cached, and among equals where most pages are free."""

    def __init__(self, cache: PagedCache, changes: list[Change], ranks: int, reuse: bool = True) -> None:
        super().__init__(cache, reuse)
        distant = [DistantCache(changes, rank, cache) for rank in range(1, ranks)]
        self.pools = [PagePool(each, reuse) for each in (cache, *distant)]
        self.open = [0] * ranks  # requests placed so far

    def _of(self, request: Request) -> PagePool:
        return self.pools[request.data_rank]

    @property
    def pages(self) -> int:
        return sum(pool.pages for pool in self.pools)

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self.pools)

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self.pools)

    def make_room(self, request: Request, pages: int) -> bool:
        return self._of(request).make_room(request, pages)

    def place(self, request: Request) -> None:
        found = [pool.cached_prefix(request) for pool in self.pools]
        request.data_rank = min(range(len(found)), key=lambda rank: (-found[rank], self.open[rank], rank))
        self.open[request.data_rank] += 1

    def match_prefix(self, request: Request, others: Iterable[Request] = ()) -> None:
        same = [other for other in others if other.data_rank == request.data_rank]
        self._of(request).match_prefix(request, same)

    def cached_prefix(self, request: Request) -> int:
        return self._of(request).cached_prefix(request)

    def grow(self, request: Request, tokens: int) -> bool:
        return self._of(request).grow(request, tokens)

    def move(self, request: Request, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._of(request).move(request, sources, targets)

    def publish(self, request: Request) -> None:
        self._of(request).publish(request)

    def release(self, request: Request, lease: tuple[str, float] | None = None) -> None:
        self._of(request).release(request, lease)

    def flush(self) -> None:
        for pool in self.pools:
            pool.flush()
