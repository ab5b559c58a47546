"""Prefix caching where layers keep a state of each sequence: pages of a prefix are of use as far as a state was kept.

A state cannot be cut back to fewer tokens, so copies of it are kept at the ends of some pages: where a prompt ends, and
where it parts from those that came before it or wait for it. Prompts are computed in pieces that end there. Of a
request that has finished or was preempted the state itself is kept, behind its last page, which may be filled in part.
All lie in places that no running request has, and the least recently used gives way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from moesaic.model.layout import PagedCache
from moesaic.serve.core.kv.store import Store
from moesaic.serve.core.page_pool import Node, PagePool, agreeing
from moesaic.serve.core.request import Request

ALIKE = 16  # waiting requests that are looked at when one is admitted


def page_pool_for(cache: PagedCache, reuse: bool, store: Store | None) -> PagePool:
    return PagePool(cache, reuse, store) if cache.states is None else StatefulPagePool(cache, reuse)


@dataclass
class _Holder:
    """A request that holds pages."""

    cuts: set[int] = field(default_factory=set)  # numbers of tokens behind which its state is to be kept
    settled: bool = False  # its state has taken in the tokens that are computed, and no others


class StatefulPagePool(PagePool):
    def __init__(self, cache: PagedCache, reuse: bool = True) -> None:
        super().__init__(cache, reuse)
        assert cache.states is not None
        self.states = cache.states
        self.free_states = list(range(cache.states.places - 1, -1, -1))
        self.kept: dict[Node, int] = {}  # places of states behind pages; the least recently used first
        self.holders: dict[int, _Holder] = {}

    def match_prefix(self, request: Request, others: Iterable[Request] = ()) -> None:
        """Give a request the cached pages of its prefix as far as a state was kept, and a copy of that."""
        assert not request.pages
        holder = self.holders[request.number] = _Holder()
        if not self.reuse or request.recomputes_prompt or request.root is None:
            return
        pages, node = self._find(request)
        holder.cuts = {pages * self.size, (len(request.tokens) - 1) // self.size * self.size}
        if node is None:
            return
        self._take(node)  # neither it nor a page before it goes meanwhile
        line = _line(node)
        if len(node.tokens) == self.size or self.available:
            request.nodes = line if len(node.tokens) == self.size else line[:-1]
            request.pages = [one.page for one in request.nodes]
            for one in request.nodes:
                self._take(one)
            if len(request.nodes) < len(line):
                request.pages.append(self._new())
                self.cache.copy_rows(node.page, request.pages[-1], len(node.tokens))
            request.computed, holder.settled = sum(len(one.tokens) for one in line), True
            source = self.kept.pop(node)
            self.kept[node] = source  # used last
            request.state = self._state_place()
            self.states.copy(source, request.state)
        self._drop(node)

    def _find(self, request: Request) -> tuple[int, Node | None]:
        """How many pages of a request's prefix are cached; and the last page, which may be filled in part, of its
        longest prefix with a state. Its last token is left to compute."""
        tokens = request.tokens[: self._shareable(request, len(request.tokens) - 1)]
        levels, path = [self.roots.get(request.root, {})], []
        pieces = [tuple(tokens[place : place + self.size]) for place in range(0, len(tokens), self.size)]
        for piece in pieces:
            node = levels[-1].get(piece)
            if node is None or len(piece) < self.size:
                break
            path.append(node)
            levels.append(node.children)
        for depth in range(len(path), -1, -1):
            ahead = pieces[depth] if depth < len(pieces) else ()
            below = [node for node in levels[depth].values() if len(node.tokens) < self.size and node in self.kept]
            below = [node for node in below if ahead[: len(node.tokens)] == node.tokens]
            if below:
                return len(path), max(below, key=lambda node: len(node.tokens))
            if depth and path[depth - 1] in self.kept:
                return len(path), path[depth - 1]
        return len(path), None

    def cached_prefix(self, request: Request) -> int:
        if not self.reuse or request.recomputes_prompt or request.root is None:
            return 0
        node = self._find(request)[1]
        return sum(len(one.tokens) for one in _line(node)) if node is not None else 0

    def meets(self, request: Request, others: Iterable[Request]) -> None:
        """Some that wait share its beginning, and will be computed when it has been."""
        if not self.reuse:
            return
        first = request.tokens[: self.size]
        waiting = (one for one in others if not one.pages and one is not request and one.root == request.root)
        for other in islice((one for one in waiting if one.tokens[: self.size] == first), ALIKE):
            self.waits_for(other, request)

    def waits_for(self, request: Request, other: Request) -> None:
        """The state of the other is kept where the two part."""
        if other.number in self.holders:
            together = agreeing(request.tokens[:-1], other.tokens)
            self.holders[other.number].cuts.add(together // self.size * self.size)

    def tokens_until_pruning(self, request: Request, tokens: int) -> int:
        """As many of the next tokens as are computed before a state is to be kept."""
        ahead = [cut - request.computed for cut in self.holders[request.number].cuts if cut > request.computed]
        return min([tokens, *ahead])

    def grow(self, request: Request, tokens: int) -> bool:
        if not super().grow(request, tokens):
            return False
        if request.state is None:
            request.state = self._state_place()
        self.holders[request.number].settled = False  # a forward begins
        return True

    def after_forward(self, request: Request) -> None:
        super().after_forward(request)
        holder, (pages, rest) = self.holders[request.number], divmod(request.computed, self.size)
        holder.settled = True
        if request.computed in holder.cuts and not rest and 0 < pages <= len(request.nodes):
            node = request.nodes[pages - 1]
            if node not in self.kept and (self.free_states or self.kept):
                assert request.state is not None
                self.kept[node] = self._state_place()
                self.states.copy(request.state, self.kept[node])

    def release(self, request: Request, lease: tuple[str, float] | None = None) -> None:
        """Its own state is kept where it stopped."""
        holder, place = self.holders.pop(request.number, _Holder()), request.state
        computed, root, request.state = request.computed, request.root, None
        tokens = request.tokens[:computed]
        whole = holder.settled and computed > 0 and self._shareable(request, computed) == computed
        super().release(request, lease)
        if place is None:
            return
        node = self._last(root, tokens) if self.reuse and whole and root is not None else None
        if node is None or node in self.kept:
            self.free_states.append(place)
        else:
            self.kept[node] = place

    def _last(self, root: object, tokens: list[int]) -> Node | None:
        """The page behind which such a sequence ends."""
        children, node = self.roots.get(root, {}), None
        for place in range(0, len(tokens), self.size):
            node = children.get(tuple(tokens[place : place + self.size]))
            if node is None:
                return None
            children = node.children
        return node

    def flush(self) -> None:
        super().flush()
        self.free_states += self.kept.values()
        self.kept.clear()

    def _evict(self) -> None:
        super()._evict()
        gone = next((node for node in self.kept if node.page == self.free[-1]), None)
        if gone is not None:
            self.free_states.append(self.kept.pop(gone))

    def _state_place(self) -> int:
        """There are as many as requests may hold pages."""
        return self.free_states.pop() if self.free_states else self.kept.pop(next(iter(self.kept)))


def _line(node: Node) -> list[Node]:
    """A page and all before it, the first one first."""
    line = [node]
    while line[-1].parent is not None:
        line.append(line[-1].parent)
    return line[::-1]
