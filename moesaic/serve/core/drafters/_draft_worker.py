"""The draft process: it grows a tree of draft tokens for every request, and goes on while the model verifies.

One forward computes the likeliest leaves of all trees. The KV cache has pages of one row, and every leaf is a sequence
of its own whose page table lists the request's rows, those of its ancestors, and its own. So branches cost no memory
and no mask; and when a verdict comes, the accepted path is appended to the request's rows, the subtree below it stays
as it is, and the rows of all other branches are free: only page tables change, no key is moved.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import math
import os
import signal
import socket
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count, takewhile

import torch

from moesaic.errors import UserError
from moesaic.model.directory import load
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters._acceptance import BINS, DECAY, MAX_RATE, Tally
from moesaic.serve.core.drafters._draft_candidates import likely_tokens
from moesaic.serve.core.drafters._draft_messages import Close, Extend, Failed, Open, Ready, Setup, Trees, Update, Wire
from moesaic.serve.core.drafters._draft_tree import DraftTree, TreeNode
from moesaic.serve.core.drafters._vocabulary import vocabulary_hash
from moesaic.serve.core.memory import pages_that_fit
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request
from moesaic.serve.core.sequence_states import refuse_request

CHUNK = 256  # tokens of prompts in one forward
LEAVES = 64  # in one forward
LEAST_LOG_CHANCE = math.log(0.01)  # to be reached, of a leaf that is computed
DIES_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG


@dataclass(eq=False)
class Drafted:
    """A request as the draft model knows it. `shadow` holds its tokens and the rows of those that are computed."""

    shadow: Request
    tree: DraftTree
    numbers: count[int] = field(default_factory=lambda: count(1))  # of its nodes
    news: list[tuple[int, int, int, float]] = field(default_factory=list)  # nodes that the engine does not know


@dataclass
class Piece:
    """Of one forward: the next tokens of a request (no leaf), or one leaf of its tree."""

    drafted: Drafted
    tokens: list[int]
    rows: list[int]  # of all tokens before, and of these
    leaf: int | None = None


class DraftWorker:
    def __init__(self, model: Model, setup: Setup) -> None:
        self.model, self.setup = model, setup
        rows = setup.rows
        if setup.cache_bytes is not None:
            rows = pages_that_fit(model, setup.cache_bytes, 1, setup.nodes)
        self.page_pool = PagePool(model.new_cache(rows, 1))
        self.requests: dict[int, Drafted] = {}  # least recently extended first
        # How often a node is accepted if its parent is, by its place among its siblings and its confidence: where a
        # draft model is unsure and right, or sure and wrong, the tree must be deeper, or wider.
        self.accepted: defaultdict[tuple[int, int], Tally] = defaultdict(Tally)

    def take(self, message: Open | Extend | Close) -> None:
        if isinstance(message, Open):
            shadow = Request(message.prompt, message.sampling, seed=message.seed)
            shadow.tokens, shadow.root = list(message.tokens), message.salt
            self.requests[message.number] = Drafted(shadow, DraftTree(0, len(message.tokens)))
        elif (drafted := self.requests.pop(message.number, None)) is None:
            return
        elif isinstance(message, Extend):
            self.requests[message.number] = drafted
            self._extend(drafted, message.tokens)
        else:
            self._release(drafted)

    def _extend(self, drafted: Drafted, tokens: list[int]) -> None:
        """Move the root down the accepted path. What is computed of it stays; what is not will be."""
        shadow, tree = drafted.shadow, drafted.tree
        at: int | None = tree.root
        for token in tokens:
            if at is not None:
                for child in tree.nodes[at].children.values():
                    node = tree.nodes[child]
                    self.accepted[node.bin].count(float(node.token == token), 1.0, DECAY)
                at = tree.nodes[at].children.get(token)
            shadow.tokens.append(token)
            if at is not None and (row := tree.nodes[at].row) is not None:
                shadow.pages.append(row)
                shadow.computed += 1
                tree.nodes[at].row = None  # it is the request's now
        self._free(tree.reroot(at if at is not None else next(drafted.numbers), len(shadow.tokens)))
        self.page_pool.publish(shadow)

    def _free(self, nodes: list[TreeNode]) -> None:
        self.page_pool.free.extend(node.row for node in nodes if node.row is not None)

    def _release(self, drafted: Drafted) -> None:
        """All its rows. Whoever needs it again computes it again."""
        self._free(drafted.tree.reroot(next(drafted.numbers), len(drafted.shadow.tokens)))
        self.page_pool.release(drafted.shadow)

    def _fits(self, length: int) -> bool:
        return length < min(self.model.config.context, self.page_pool.cache.pages)

    def _ripe(self, drafted: Drafted) -> list[tuple[float, int]]:
        """The leaves worth computing, with the chance that each is reached; likeliest first."""
        tree, ends = drafted.tree, self.setup.stop_tokens
        if drafted.shadow.pending:
            return []
        if drafted.shadow.sampling.ignore_eos:
            ends = frozenset()
        least, room, leaves = tree.nodes[tree.root].log_chance + LEAST_LOG_CHANCE, self.setup.nodes, []
        for number, node in tree.nodes.items():
            if node.row is not None:
                room -= 1
            elif node.log_chance >= least and number != tree.root and node.token not in ends:
                leaves.append((node.log_chance, number))
        best = heapq.nlargest(min(room, self.setup.width), leaves)
        return [
            (tree.chance(leaf), leaf) for _, leaf in best if self._fits(tree.length + len(tree.path(leaf)))
        ]  # fmt: skip

    @torch.inference_mode()
    def step(self) -> tuple[bool, list[Update]]:
        """One forward: whether there was anything to compute, and what the engine should know of it."""
        pieces = self._choose()
        if pieces:
            self._compute(pieces)
        updates = []
        for number, drafted in self.requests.items():
            if drafted.news:
                updates.append(Update(number, drafted.tree.length, drafted.tree.root, drafted.news))
                drafted.news = []
        return bool(pieces), updates

    def _choose(self) -> list[Piece]:
        pieces: list[Piece] = []
        chunk, used = CHUNK, set[int]()
        for number, drafted in reversed(list(self.requests.items())):
            shadow = drafted.shadow
            if not shadow.pending or not self._fits(len(shadow.tokens)) or chunk <= 0:
                continue
            if not shadow.pages:
                self.page_pool.match_prefix(shadow)
            tokens = shadow.tokens[shadow.computed :][:chunk]
            used.add(number)
            if (rows := self._rows(drafted, len(tokens), used)) is not None:
                shadow.pages += rows
                pieces.append(Piece(drafted, tokens, list(shadow.pages)))
                chunk -= len(tokens)
        leaves = [(*entry, number) for number, drafted in self.requests.items() for entry in self._ripe(drafted)]
        for _, leaf, number in sorted(leaves, reverse=True)[:LEAVES]:
            drafted = self.requests[number]
            if leaf not in drafted.tree.nodes:  # it was evicted for another
                continue
            used.add(number)
            if (rows := self._rows(drafted, 1, used)) is not None:
                tree = drafted.tree
                above = [row for node in tree.path(leaf)[:-1] if (row := tree.nodes[node].row) is not None]
                pieces.append(Piece(drafted, [tree.nodes[leaf].token], [*drafted.shadow.pages, *above, *rows], leaf))
        return pieces

    def _rows(self, drafted: Drafted, number: int, used: set[int]) -> list[int] | None:
        """So many free rows. Requests that had a verdict before this one give theirs up; never the other way, or two
        would take them from each other for ever."""
        shadow = drafted.shadow
        before = len(shadow.pages)
        while not self.page_pool.grow(shadow, before + number):
            older = takewhile(lambda entry: entry[1] is not drafted, self.requests.items())
            idle = next((other for key, other in older if key not in used and other.shadow.pages), None)
            if idle is None:
                return None
            self._release(idle)
        rows = shadow.pages[before:]
        del shadow.pages[before:]
        return rows

    def _compute(self, pieces: list[Piece]) -> None:
        model = self.model
        layout = Layout(
            [len(piece.tokens) for piece in pieces],
            cached=[len(piece.rows) - len(piece.tokens) for piece in pieces],
            cache=self.page_pool.cache,
            pages=[piece.rows for piece in pieces],
            device=model.device,
        )
        tokens_T = torch.tensor([token for piece in pieces for token in piece.tokens], device=model.device)
        x_TD, context = model.begin(tokens_T, layout)
        layer = 0
        while layer < len(model.layers):
            x_TD, layer = model.advance(x_TD, context, layer)
        hidden_TD = model.finish(x_TD, context)
        ends: list[tuple[Piece, int]] = []
        for piece, span in zip(pieces, layout.spans):
            shadow = piece.drafted.shadow
            if piece.leaf is not None:
                piece.drafted.tree.nodes[piece.leaf].row = piece.rows[-1]
            else:
                shadow.computed += len(piece.tokens)
                self.page_pool.publish(shadow)
            if piece.leaf is not None or not shadow.pending:
                ends.append((piece, span.stop - 1))
        if ends:
            rows = torch.tensor([row for _, row in ends], device=model.device)
            self._expand([piece for piece, _ in ends], model.logits_at(hidden_TD, rows))

    def _expand(self, pieces: list[Piece], logits_RV: torch.Tensor) -> None:
        """Give each of these nodes the children that are likely to follow."""
        paths = []
        for piece in pieces:
            tree = piece.drafted.tree
            below = tree.path(piece.leaf) if piece.leaf is not None else []
            paths.append((piece.drafted.shadow, [tree.nodes[node].token for node in below]))
        found = likely_tokens(logits_RV[:, : self.setup.vocab], paths, self.setup.stop_tokens, self.setup.width)
        for piece, likely in zip(pieces, found, strict=True):
            drafted = piece.drafted
            parent = piece.leaf if piece.leaf is not None else drafted.tree.root
            for place, (token, confidence) in enumerate(likely):
                kind = place, int(confidence * (BINS - 1))
                confidence = min(MAX_RATE, self.accepted[kind].rate(confidence))
                number = next(drafted.numbers)
                drafted.tree.add(number, parent, token, confidence).bin = kind
                drafted.news.append((number, parent, token, confidence))


def main(descriptor: int, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the server, which lets requests finish
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # one that is stopped would not notice that the socket was closed
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    wire = Wire(socket.socket(fileno=descriptor))
    with contextlib.suppress(EOFError):  # the engine has gone
        _serve(wire)


def _serve(wire: Wire) -> None:
    setup, *waiting = wire.receive(None)
    try:
        model = load(setup.path, dtype=setup.dtype, device=setup.device, threads=setup.threads)
        refuse_request(model.config, str(setup.path), "rejected draft tokens cannot be taken out of it")
        worker = DraftWorker(model, setup)
    except Exception as error:
        problem = error if isinstance(error, UserError) else UserError(setup.path, f"{type(error).__name__}: {error}")
        wire.send(Failed(problem), wait=True)
        return
    wire.send(Ready(model.config.vocab, vocabulary_hash(model)), wait=True)
    seen, busy = 0, False
    while True:
        for message in waiting or wire.receive(0.0 if busy else None):
            worker.take(message)
            seen += 1
        waiting = []
        busy, updates = worker.step()
        wire.send(Trees(seen, not busy, updates), wait=True)
