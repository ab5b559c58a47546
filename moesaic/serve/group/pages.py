"""Pages that a group of ranks gets from another engine, or gives to one: each rank asks for the key heads it holds, and
gives those, whatever layout the other has.

Rank 0 knows names. For a request whose pages are elsewhere it tells all ranks to fetch them (FETCH), each in the
background; the others say to rank 0 how many have arrived. When the request is admitted, those that all ranks have are
written to the cache (`Write` among the changes of the next step), and the rest is forgotten (`Drop`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moesaic.errors import UserError
from moesaic.model.config import GroupedQuery
from moesaic.model.layout import PagedCache
from moesaic.model.transformer import Model
from moesaic.parallel.tensor.partition import kv_copies, kv_heads_of
from moesaic.serve.core.request import Request
from moesaic.serve.group.step_array import Change, Command, Drop, Write
from moesaic.serve.group.worker_group import WorkerGroup
from moesaic.serve.pages.channel import ChannelBroken
from moesaic.serve.pages.identity import identity_of_model, namespace
from moesaic.serve.pages.incoming import Incoming, Lobby, Pieces
from moesaic.serve.pages.names import PageNames
from moesaic.serve.pages.outside import LOBBY, READERS, OutsidePages, TierOptions
from moesaic.serve.pages.page_bytes import PageBytes
from moesaic.serve.pages.remote import Origin, Rank, RemotePages
from moesaic.serve.pages.server import PageServer, RankPages, own_host

if TYPE_CHECKING:
    from moesaic.serve.group.engine import GroupEngine


def key_heads(model: Model, group: WorkerGroup) -> range | None:
    """Those this rank holds, counted as in the whole model; None where rows have no heads."""
    attention, tp = model.config.attention, group.layout.tp
    if not isinstance(attention, GroupedQuery):
        return None
    count = kv_heads_of(attention, tp)
    start = group.tp // kv_copies(attention, tp) * count
    return range(start, start + count)


def meet(group: WorkerGroup, pages: RankPages) -> tuple[Rank, ...]:
    """All ranks call it: where pages of each can be had."""
    heads = pages.pages.heads
    numbers = [*socket.inet_aton(socket.gethostbyname(pages.door.host)), pages.door.port, heads.start, heads.stop]
    found = group.control.gather(torch.tensor(numbers), "start").tolist()
    return tuple(Rank(f"{socket.inet_ntoa(bytes(one[:4]))}:{one[4]}", *one[5:]) for one in found)


@dataclass(eq=False)
class SharedIncoming(Incoming):
    """Rank 0's part of pages that come to all ranks."""

    ticket: int = 0
    places: dict[bytes, int] = field(default_factory=dict)  # the names in order
    others: int = 0  # ranks beside this one
    arrived: dict[int, int] = field(default_factory=dict)  # by rank, how many of the first pages
    changes: list[Change] = field(default_factory=list)
    all_arrived: threading.Event = field(default_factory=threading.Event)

    def take(self, name: bytes) -> tuple[str, Pieces] | None:
        """Only what all have."""
        everywhere = min(self.arrived.values(), default=len(self.places)) if len(self.arrived) == self.others else 0
        if self.places.get(name, 0) >= everywhere:
            return None
        return super().take(name)

    def close(self) -> None:
        if not self.closed:
            self.changes.append(Drop(self.ticket))
        super().close()


class GroupPageServer(PageServer):
    """Rank 0's: it also hears from the others what has arrived there."""

    outside: GroupPages

    def ranks(self) -> tuple[Rank, ...]:
        return self.outside.ranks

    def _answer(self, channel: Any, asked: dict[str, Any], pinned: set[str]) -> None:
        if "arrived" in asked:
            self.outside.arrived(int(asked["arrived"]), int(asked["rank"]), int(asked["count"]), int(asked["bytes"]))
        else:
            super()._answer(channel, asked, pinned)


class GroupPages(OutsidePages):
    """Of rank 0."""

    def __init__(self, engine: GroupEngine, options: TierOptions) -> None:
        super().__init__(engine.page_pool, options, engine.clock, key_heads(engine.model, engine.group))
        self.engine = engine
        engine.outside = self
        self.tickets: dict[int, SharedIncoming] = {}
        self._numbers = itertools.count()
        self.server = GroupPageServer(engine, own_host(options.host), options.transport)
        self.server.outside = self
        self.ranks = meet(engine.group, self.server)

    def new_incoming(self, request: Request, names: list[bytes]) -> Incoming:
        """All ranks begin to fetch."""
        assert request.origin is not None
        ticket, engine = next(self._numbers), self.engine
        incoming = SharedIncoming(
            self.lobby,
            self.clock() + self.options.page_seconds,
            self.clock,
            ticket=ticket,
            places={name: place for place, name in enumerate(names)},
            others=engine.group.ranks - 1,
            changes=engine.changes,
        )
        self.tickets[ticket] = incoming
        asked = {
            "ticket": ticket,
            "names": [name.hex() for name in names],
            "ranks": [asdict(rank) for rank in request.origin.ranks],
            "seconds": self.options.page_seconds,
        }
        engine.tell(Command.FETCH, pack(asked))
        return incoming

    def arrived(self, ticket: int, rank: int, count: int, received: int) -> None:
        if (incoming := self.tickets.get(ticket)) is not None:
            incoming.arrived[rank] = count
            self.remote.received += received
            if len(incoming.arrived) == incoming.others:
                incoming.all_arrived.set()

    def write(self, request: Request, page: int, found: tuple[str, Pieces], tokens: int) -> None:
        incoming = request.incoming
        assert isinstance(incoming, SharedIncoming)
        super().write(request, page, found, tokens)
        self.engine.changes.append(Write(0, incoming.ticket, incoming.places[incoming.last], page))

    def _read_remote(self, incoming: Incoming, names: list[bytes], origin: Origin) -> None:
        """The lease ends when all ranks have what they need."""
        assert isinstance(incoming, SharedIncoming)
        try:
            super()._read_remote(incoming, names, replace(origin, lease=""))
            incoming.all_arrived.wait(max(0.0, incoming.until - self.clock()))
            self.remote.end_lease(origin, max(1.0, incoming.until - self.clock()))
        finally:
            self.tickets.pop(incoming.ticket, None)


class FollowerPages:
    """Of another rank."""

    def __init__(self, model: Model, group: WorkerGroup, cache: PagedCache, options: TierOptions) -> None:
        self.rank = group.rank
        self.pages = PageBytes(cache, key_heads(model, group))
        self.server = RankPages(self.pages, own_host(options.host), None, options.transport)
        self.first = meet(group, self.server)[0].address
        self.remote = RemotePages(self.pages, model.device.type == "cuda")
        self.lobby = Lobby(LOBBY)
        self.incoming: dict[int, tuple[Incoming, list[bytes]]] = {}
        self._readers = ThreadPoolExecutor(READERS, "page reader")

    def fetch(self, numbers: list[int]) -> None:
        asked = unpack(numbers)
        names = [bytes.fromhex(name) for name in asked["names"]]
        origin = Origin(tuple(Rank(**rank) for rank in asked["ranks"]))
        incoming = Incoming(self.lobby, time.monotonic() + asked["seconds"], time.monotonic)
        self.incoming[asked["ticket"]] = incoming, names
        self._readers.submit(self._read, asked["ticket"], incoming, names, origin)

    def change(self, change: Write | Drop) -> None:
        incoming, names = self.incoming[change.ticket]
        if isinstance(change, Drop):
            incoming.close()
            del self.incoming[change.ticket]
            return
        found = incoming.take(names[change.place])
        assert found is not None, "rank 0 was told that it is here"
        for box, data in found[1]:
            self.pages.write([change.page], data[None], box)

    def _read(self, ticket: int, incoming: Incoming, names: list[bytes], origin: Origin) -> None:
        count = received = 0
        with contextlib.suppress(ChannelBroken):
            fetched = self.remote.fetch(origin, names, lambda: incoming.until - time.monotonic())
            for name, pieces in fetched:
                if not incoming.awaited or not incoming.add(name, "remote", pieces):
                    fetched.close()
                    break
                count += 1
                received += sum(data.nbytes for _, data in pieces)
        with contextlib.suppress(ChannelBroken):
            message = {"arrived": ticket, "rank": self.rank, "count": count, "bytes": received}
            self.remote.tell(self.first, message, max(1.0, incoming.until - time.monotonic()))


def pack(message: dict[str, Any]) -> list[int]:
    content = json.dumps(message).encode()
    return np.frombuffer(content + b" " * (-len(content) % 8), np.int64).tolist()


def unpack(numbers: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(np.array(numbers, np.int64).tobytes())
    return found


def group_pages(engine: GroupEngine, options: TierOptions | None, weights: str | None) -> GroupPages | None:
    if options is None or not options.travel:
        return None
    pool = engine.page_pool
    pool.names = PageNames(namespace(weights or identity_of_model(engine.model), engine.model, engine.cache))
    pool.outside = found = GroupPages(engine, options)
    return found


def check_tiers(options: TierOptions | None, group: WorkerGroup) -> None:
    """Refuse in words what a group of ranks does not do, on every rank."""
    if options is None:
        return
    if options.host_bytes or options.disk_bytes:
        flag = "--cache-host-gb" if options.host_bytes else "--cache-disk-gb"
        raise UserError(flag, "a group of ranks has no tiers below its KV cache", "Leave it out, or --layout.")
    if options.travel and group.layout.dp > 1:
        problem = f"dp={group.layout.dp}: ranks with requests of their own do not exchange pages with other engines"
        raise UserError("--prefill-layout, --decode-layout", problem, "Take a layout with tp, and ep no larger.")
