"""The pages of the KV cache: a pool of free pages, and a radix tree of prefixes whose pages are shared.

A page is private while its request writes it. Once full it is published: it becomes a node of the radix tree, keyed by
its tokens below the node of the page before it, and any request with the same prefix uses it too. Where only the first
tokens of a page agree, those rows are copied to a private page (copy on write). Nodes without users stay cached until
pages are needed, and are evicted least recently used first, leaves before their parents.

There is one tree per root: tenants (salts), adapters and weight versions share no pages.

With `names` every node has a name that other processes know too (`serve/pages/names.py`): pages are found by it, are
held for somebody by a lease, go to `outside` when they are evicted and come back from there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from moesaic.model.layout import PagedCache
from moesaic.serve.core.request import Request
from moesaic.serve.pages.names import PageNames, page_name

if TYPE_CHECKING:
    from moesaic.serve.core.kv.store import Store


@dataclass(eq=False)
class Node:
    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    root: Hashable
    users: int = 0
    used: int = 0  # when its last user left; the least is evicted first
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    name: bytes = b""


@dataclass(eq=False)
class Lease:
    """Pages that nobody uses and that are kept for somebody until then, unless they are needed here before; those that
    somebody reads are kept without end."""

    nodes: list[Node]
    until: float


class Outside(Protocol):
    """Where pages are beside this cache."""

    def find(self, request: Request, name: bytes) -> Any | None:
        """A page that can be written to the cache now, if there is one of this name."""

    def write(self, request: Request, page: int, found: Any, tokens: int) -> None: ...

    def admitted(self, request: Request) -> None:
        """It has all that could be found."""

    def evicted(self, name: bytes, page: int) -> None:
        """A page is about to be used for something else."""


class PagePool:
    """Without `reuse` there is no prefix caching: pages stay private. With a `store` requests are compact: they share
    nothing, and free pages as their KV policy prunes."""

    def __init__(self, cache: PagedCache, reuse: bool = True, store: Store | None = None) -> None:
        self.cache = cache
        self.size = cache.page_size
        self.reuse = reuse and store is None
        self.store = store
        self.prompts_only = False  # where what is computed of a prompt and of a completion differs in its last bits
        self.free = list(range(cache.pages - 1, -1, -1))
        self.roots: dict[Hashable, dict[tuple[int, ...], Node]] = {}
        self.unused: list[tuple[int, int, Node]] = []  # a heap; entries whose node has been used since are stale
        self.idle = 0  # published pages without users
        self.clock = itertools.count(1)
        self.queries = 0  # tokens looked up, and found, of requests that were admitted
        self.hits = 0
        self.names: PageNames | None = None
        self.nodes: dict[bytes, Node] = {}  # by their names
        self.leases: dict[str, Lease] = {}  # the oldest first
        self.revoked = 0  # leases that ended because their pages were needed
        self.outside: Outside | None = None

    @property
    def pages(self) -> int:
        return self.cache.pages

    @property
    def available(self) -> int:
        return len(self.free) + self.idle

    @property
    def in_use(self) -> int:
        return self.cache.pages - self.available

    def place(self, request: Request) -> None:
        """Choose the pool of a new request; here there is one."""

    def match_prefix(self, request: Request, others: Iterable[Request] = ()) -> None:
        """Give a request the cached pages of its prefix. Its last token is left to compute: it gives the logits.

        `others` are running requests, whose unpublished last pages can be copied from.
        """
        assert not request.pages
        known = self._shareable(request, len(request.tokens) - 1)
        if not self.reuse or request.recomputes_prompt or request.root is None:
            return
        children = self.roots.get(request.root, {})
        place = 0
        while place + self.size <= known:
            node = children.get(tokens := tuple(request.tokens[place : place + self.size]))
            if node is None:
                node = self._bring_back(request, tokens)
            if node is None:
                break
            self._take(node)
            request.nodes.append(node)
            request.pages.append(node.page)
            place += self.size
            children = node.children
        place += self._rest_from_outside(request, place) or self._copy_rows(request, children, others, known)
        request.computed = place

    def waits_for(self, request: Request, other: Request) -> None:
        """A request that comes later shares its beginning with one that computes it."""

    def meets(self, request: Request, others: Iterable[Request]) -> None:
        """A request that is about to be computed meets those that are there."""

    def cached_prefix(self, request: Request) -> int:
        """How many of a request's tokens are cached now, in whole pages."""
        if not self.reuse or request.recomputes_prompt or request.root is None:
            return 0
        children, place = self.roots.get(request.root, {}), 0
        while node := children.get(tuple(request.tokens[place : place + self.size])):
            children, place = node.children, place + self.size
        return min(place, len(request.tokens) - 1)

    def grow(self, request: Request, tokens: int) -> bool:
        """Allocate the pages a request lacks for so many tokens; False, and nothing changed, where too few are free."""
        if request.compact is not None:
            missing = request.compact.pages_for(tokens - request.computed) - len(request.pages)
        else:
            gap = request.windows.gap(request.computed, self.size) if request.windows is not None else 0
            missing = -(-(tokens + gap) // self.size) - len(request.pages)
        if not self.make_room(request, missing):
            return False
        request.pages.extend(self._new() for _ in range(missing))
        return True

    def move(self, request: Request, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move single rows of a request, numbered through all pages."""
        self.cache.move(sources, targets)

    def tokens_until_pruning(self, request: Request, tokens: int) -> int:
        """As many of the next tokens as are computed before the KV policy prunes."""
        if self.store is None:
            return tokens
        if request.compact is None:
            request.compact = self.store.begin(request)
        return min(tokens, request.compact.due - request.computed)

    def after_forward(self, request: Request) -> None:
        """After a forward: prune if that is due, or else publish the pages a request has filled."""
        if request.compact is not None:
            self.free.extend(request.compact.end(request.tokens, request.pages, request.computed))
        elif request.windows is not None:
            if moved := request.windows.closing_gap(request.computed, request.pages, self.size):
                self.move(request, *moved)
        else:
            self.publish(request)

    def publish(self, request: Request) -> None:
        """Publish the pages a request has filled."""
        if not self.reuse or request.root is None:
            return
        for number in range(len(request.nodes), self._shareable(request, request.computed) // self.size):
            tokens = tuple(request.tokens[number * self.size : (number + 1) * self.size])
            children = self._children(request, number)
            node = children.get(tokens)
            if node is None:
                node = self._add(request, number, tokens)
            else:  # another request was quicker: use its page
                self.free.append(request.pages[number])
                request.pages[number] = node.page
            self._take(node)
            request.nodes.append(node)

    def release(self, request: Request, lease: tuple[str, float] | None = None) -> None:
        """Free all pages of a request; the published ones stay cached until pages are needed, or are held by a lease
        of that name until that time."""
        self.publish(request)
        held = list(request.nodes)
        full, rest = divmod(self._shareable(request, request.computed), self.size)
        private = request.pages[len(request.nodes) :]
        if rest and self.reuse and request.root is not None and len(request.nodes) == full:
            # It is not written any more, so the last page, partly filled, can be copied from too.
            tokens = tuple(request.tokens[full * self.size : full * self.size + rest])
            if not any(longer[:rest] == tokens for longer in self._children(request, full)):
                held.append(self._add(request, full, tokens))
                self._release_node(held[-1])
                private = private[1:]
        if lease is not None:
            self.hold(lease[0], held, lease[1])
        for node in reversed(request.nodes):  # leaves first, so that they also go first
            self._drop(node)
        self.free.extend(reversed(private))
        request.pages, request.nodes, request.computed, request.compact = [], [], 0, None

    def flush(self) -> None:
        """Drop all published prefixes, as after a change of weights. The caller sees to it that running requests, whose
        pages are not what the new weights would give, publish nothing more (`request.root = None`)."""
        for node in [node for children in self.roots.values() for node in _all(children)]:
            node.children, node.parent, node.root = {}, None, None
            if node.users == 0:
                self.idle -= 1
                self.free.append(node.page)
        self.roots.clear()
        self.unused.clear()
        self.nodes.clear()

    # By name

    def hold(self, lease: str, nodes: Sequence[Node], until: float) -> None:
        """Keep some pages, and all before them; a lease of the same name ends."""
        held: dict[Node, None] = {}  # parents first
        for node in nodes:
            path = []
            above: Node | None = node
            while above is not None and above not in held:
                path.append(above)
                above = above.parent
            held |= dict.fromkeys(reversed(path))
        for node in held:
            self._take(node)
        self.end_lease(lease)
        self.leases[lease] = Lease(list(held), until)

    def end_lease(self, lease: str) -> bool:
        """False where it has ended already."""
        if (found := self.leases.pop(lease, None)) is None:
            return False
        for node in reversed(found.nodes):
            self._drop(node)
        return True

    def end_leases(self, now: float) -> None:
        """Those that nobody came for in time."""
        for name in [name for name, lease in self.leases.items() if lease.until <= now]:
            self.end_lease(name)

    def make_room(self, request: Request, pages: int) -> bool:
        """Whether a request can have so many pages: leases give way, oldest first."""
        while pages > self.available:
            oldest = next((name for name, lease in self.leases.items() if lease.until < float("inf")), None)
            if oldest is None:
                return False
            self.end_lease(oldest)
            self.revoked += 1
        return True

    def _bring_back(self, request: Request, tokens: tuple[int, ...]) -> Node | None:
        """The next page of a request from outside, published here like one that was computed."""
        if self.outside is None or self.names is None or not self.available:
            return None
        found = self.outside.find(request, self._name(request, len(request.nodes), tokens))
        if found is None:
            return None
        request.pages.append(self._new())
        self.outside.write(request, request.pages[-1], found, self.size)
        node = self._add(request, len(request.nodes), tokens)
        request.pages.pop()
        return node

    def _rest_from_outside(self, request: Request, place: int) -> int:
        """All but the last of a request's tokens after its full pages, if that is what comes for it; how many."""
        rest = tuple(request.tokens[place:-1])
        incoming = request.incoming is not None and self.outside is not None and self.names is not None
        if not incoming or not 0 < len(rest) < self.size or not self.available:
            return 0
        assert self.outside is not None
        found = self.outside.find(request, self._name(request, len(request.nodes), rest))
        if found is None:
            return 0
        request.pages.append(self._new())
        self.outside.write(request, request.pages[-1], found, len(rest))
        return len(rest)

    def _name(self, request: Request, number: int, tokens: tuple[int, ...]) -> bytes:
        assert self.names is not None
        above = request.nodes[number - 1].name if number else self.names.root(request.root)
        return page_name(above, tokens)

    def _copy_rows(
        self, request: Request, children: dict[tuple[int, ...], Node], others: Iterable[Request], known: int
    ) -> int:
        """Copy the rows of the page that agrees longest with what comes next; how many there were."""
        place = len(request.pages) * self.size
        wanted = tuple(request.tokens[place : min(place + self.size, known)])
        best, page, node = 0, -1, None
        if not wanted:
            return 0
        for tokens, child in children.items():
            if tokens[0] == wanted[0] and (found := agreeing(tokens, wanted)) > best:
                best, page, node = found, child.page, child
        for other in others:
            shared = self._shareable(other, other.computed)
            if other.root == request.root and other.nodes == request.nodes and shared > place:
                if (found := agreeing(other.tokens[place:shared], wanted)) > best:
                    best, page, node = found, other.pages[len(other.nodes)], None
        if not best:
            return 0
        if node is not None:
            self._take(node)  # so that it is not evicted for the new page
        if self.available:
            request.pages.append(self._new())
            self.cache.copy_rows(page, request.pages[-1], best)
        else:
            best = 0
        if node is not None:
            self._drop(node)
        return best

    def _shareable(self, request: Request, tokens: int) -> int:
        """How many of the first tokens may be shared."""
        return min(tokens, len(request.prompt)) if self.prompts_only else tokens

    def _children(self, request: Request, number: int) -> dict[tuple[int, ...], Node]:
        """What is published below the page before page `number`."""
        return request.nodes[number - 1].children if number else self.roots.setdefault(request.root, {})

    def _add(self, request: Request, number: int, tokens: tuple[int, ...]) -> Node:
        node = Node(tokens, request.pages[number], request.nodes[number - 1] if number else None, request.root)
        self._children(request, number)[tokens] = node
        if self.names is not None:
            node.name = self._name(request, number, tokens)
            self.nodes[node.name] = node
        self.idle += 1
        return node

    def _new(self) -> int:
        if not self.free:
            self._evict()
        return self.free.pop()

    def _take(self, node: Node) -> None:
        if node.users == 0:
            self.idle -= 1
        node.users += 1

    def _drop(self, node: Node) -> None:
        node.users -= 1
        if node.users == 0 and node.root is None:  # the tree was flushed meanwhile
            self.free.append(node.page)
        elif node.users == 0:
            self.idle += 1
            self._release_node(node)

    def _release_node(self, node: Node) -> None:
        node.used = next(self.clock)
        heapq.heappush(self.unused, (node.used, id(node), node))
        if len(self.unused) > 4 * self.cache.pages:  # mostly stale: pages that are used again and again, never evicted
            self.unused = [entry for entry in self.unused if not entry[2].users and entry[2].used == entry[0]]
            heapq.heapify(self.unused)

    def _evict(self) -> None:
        """Free the least recently used page without users. A parent lost its last user after its children, so the first
        that is not stale has none left."""
        while True:
            used, _, node = heapq.heappop(self.unused)
            if node.users == 0 and node.used == used and not node.children:
                break
        if self.outside is not None and len(node.tokens) == self.size:
            self.outside.evicted(node.name, node.page)
        self.nodes.pop(node.name, None)
        siblings = node.parent.children if node.parent is not None else self.roots[node.root]
        del siblings[node.tokens]
        if not siblings and node.parent is None:
            del self.roots[node.root]
        self.idle -= 1
        self.free.append(node.page)


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their start on."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _all(children: dict[tuple[int, ...], Node]) -> list[Node]:
    found = list(children.values())
    for node in found:  # grows as it is walked
        found.extend(node.children.values())
    return found
