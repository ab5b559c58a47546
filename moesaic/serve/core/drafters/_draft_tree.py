"""A tree of draft tokens that outlives a step: it grows at its leaves, and its root moves down the accepted path.

The draft process grows one for every request, the engine keeps a copy. Nodes are numbered by the former, so that what
it says of a node stays true however far the engine has got.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.serve.core.drafters import Draft

LEAST = 1e-6  # confidence: its logarithm is summed


@dataclass
class TreeNode:
    """`row` is where its keys and values are, once they are computed; then it has children too."""

    token: int
    parent: int
    confidence: float = 1.0
    log_chance: float = 0.0  # that it is accepted, and all before it
    row: int | None = None
    bin: tuple[int, int] = (0, 0)  # by which it is learned how often such nodes are accepted
    children: dict[int, int] = field(default_factory=dict)  # by token


class DraftTree:
    """`root` is a request's last token, the `length`-th, and a node like all others."""

    def __init__(self, root: int, length: int, token: int = -1) -> None:
        self.root, self.length = root, length
        self.nodes = {root: TreeNode(token, -1)}

    def add(self, number: int, parent: int, token: int, confidence: float) -> TreeNode:
        above = self.nodes[parent]
        log_chance = above.log_chance + math.log(max(LEAST, confidence))
        node = self.nodes[number] = TreeNode(token, parent, confidence, log_chance)
        above.children[token] = number
        return node

    def walk(self, tokens: Sequence[int]) -> int | None:
        """The node that these tokens lead to from the root."""
        at: int | None = self.root
        for token in tokens:
            at = self.nodes[at].children.get(token) if at is not None else None
        return at

    def path(self, number: int) -> list[int]:
        """The nodes from below the root down to this one."""
        found: list[int] = []
        while number != self.root:
            found.append(number)
            number = self.nodes[number].parent
        return found[::-1]

    def chance(self, number: int) -> float:
        return math.exp(self.nodes[number].log_chance - self.nodes[self.root].log_chance)

    def reroot(self, root: int, length: int) -> list[TreeNode]:
        """Keep a node and all below it; what was dropped. A node that is not there begins a new tree."""
        kept: dict[int, TreeNode] = {}
        waiting = [root] if root in self.nodes else []
        while waiting:
            number = waiting.pop()
            kept[number] = self.nodes[number]
            waiting.extend(self.nodes[number].children.values())
        dropped = [node for number, node in self.nodes.items() if number not in kept]
        self.nodes = kept or {root: TreeNode(-1, -1)}
        self.nodes[root].parent = -1
        self.root, self.length = root, length
        return dropped

    def draft(self, start: int, limit: int) -> Draft:
        """At most so many nodes below this one, likeliest first: a parent is never less likely than its children."""
        draft, places = Draft(), {start: -1}
        waiting = [(-self.nodes[child].log_chance, child) for child in self.nodes[start].children.values()]
        heapq.heapify(waiting)
        while waiting and len(draft) < limit:
            _, number = heapq.heappop(waiting)
            node = self.nodes[number]
            places[number] = len(draft)
            draft.tokens.append(node.token)
            draft.parents.append(places[node.parent])
            draft.confidence.append(node.confidence)
            for child in node.children.values():
                heapq.heappush(waiting, (-self.nodes[child].log_chance, child))
        return draft
