"""Asks another engine for pages by name, and for each only what this one holds of it (a box of key heads).

The two may have other numbers of ranks. The first rank there knows the names and pins the pages while they are read;
all ranks there that hold heads of ours give their boxes. A channel that broke is thrown away, and made again when the
next request needs one: an engine that has come back is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moesaic.serve.pages.channel import Channel, ChannelBroken, knock
from moesaic.serve.pages.incoming import Pieces
from moesaic.serve.pages.page_bytes import PageBytes
from moesaic.serve.pages.transport import PageTransport, empty, transport

BLOCK = 32 << 20  # bytes that are asked for at a time


@dataclass(frozen=True)
class Rank:
    address: str
    start: int = 0  # of the key heads it holds
    stop: int = 0

    @property
    def heads(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class Origin:
    """Where pages are: the ranks of an engine, the first of which knows their names, and the lease to be ended."""

    ranks: tuple[Rank, ...]
    lease: str = ""


class Connection:
    """One channel to one rank, used by one thread at a time."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.channel: Channel = knock(address, seconds)
        self.kind: str = self.channel.hear(seconds)["transport"]

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.channel.say(message, seconds)
        return self.channel.hear(seconds)


class RemotePages:
    """Used by several threads. `pages` is the cache that they are for."""

    def __init__(self, pages: PageBytes, pinned: bool = False) -> None:
        self.pages, self.pinned = pages, pinned
        self.received = 0  # bytes
        self._idle: dict[str, list[Connection]] = {}
        self._transports: dict[str, PageTransport] = {}
        self._lock = threading.Lock()

    def fetch(
        self, origin: Origin, names: Sequence[bytes], left: Callable[[], float]
    ) -> Generator[tuple[bytes, Pieces], None, None]:
        """Page after page, as they come; `left` says how many seconds there are. ChannelBroken where no more come."""
        first, answer = self._pin(origin, names, left)
        try:
            pages = [int(page) for page in answer["pages"]]
            ended = {"end": [answer["pin"], origin.lease]}
            step = max(1, BLOCK // self.pages.size())
            for start in range(0, len(pages), step):
                block = pages[start : start + step]
                boxes = [(box, self._read(rank, first, block, box, left)) for rank, box in self._boxes(origin)]
                for number, name in enumerate(names[start : start + len(block)]):
                    yield name, [(box, data[number]) for box, data in boxes]
        except GeneratorExit:  # nobody wants the rest
            first.channel.say(ended, left())
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ChannelBroken(f"an answer that is none ({error})") from None
        first.channel.say(ended, max(1.0, left()))
        self._give_back(first)

    def _pin(
        self, origin: Origin, names: Sequence[bytes], left: Callable[[], float]
    ) -> tuple[Connection, dict[str, Any]]:
        """On a channel of before, if there is one and it is still good."""
        message = {"pin": [name.hex() for name in names]}
        address = origin.ranks[0].address
        with self._lock:
            idle = self._idle.get(address)
            first = idle.pop() if idle else None
        if first is not None:
            try:
                return first, first.ask(message, left())
            except ChannelBroken:
                if left() <= 0:
                    raise
        first = Connection(address, left())
        return first, first.ask(message, left())

    def end_lease(self, origin: Origin, seconds: float) -> None:
        """Nothing is needed from there any more."""
        self.tell(origin.ranks[0].address, {"end": [origin.lease]}, seconds)

    def tell(self, address: str, message: dict[str, Any], seconds: float) -> None:
        connection = self._connect(address, seconds)
        connection.channel.say(message, seconds)
        self._give_back(connection)

    def close(self) -> None:
        """Say to all that nobody asks any more."""
        with self._lock:
            self._idle.clear()

    def _boxes(self, origin: Origin) -> list[tuple[Rank, range | None]]:
        """Which rank there gives which of our key heads; where rows have no heads, the first gives all."""
        if not self.pages.by_heads:
            return [(origin.ranks[0], None)]
        ours = self.pages.heads
        found: list[tuple[Rank, range | None]] = []
        start = ours.start
        for rank in sorted(origin.ranks, key=lambda rank: rank.start):
            box = range(max(start, rank.start), min(ours.stop, rank.stop))
            if len(box) and box.start == start:
                found.append((rank, box))
                start = box.stop
        if start != ours.stop:
            raise ChannelBroken(f"nobody there holds key head {start}")
        return found

    def _read(
        self, rank: Rank, first: Connection, pages: list[int], box: range | None, left: Callable[[], float]
    ) -> Tensor:
        own = first if rank.address == first.address else self._connect(rank.address, left())
        size = self.pages.size(box)
        answer = own.ask({"read": pages, "box": [box.start, box.stop] if box is not None else None}, left())
        if answer.get("bytes") != size:
            raise ChannelBroken(f"pages of {answer.get('bytes')} bytes, where {size} were expected")
        data = empty((len(pages), size), self.pinned)
        self._by(own.kind).receive(own.channel, data, left())
        with self._lock:
            self.received += data.nbytes
        if own is not first:
            self._give_back(own)
        return data

    def _by(self, kind: str) -> PageTransport:
        with self._lock:
            if kind not in self._transports:
                self._transports[kind] = transport(kind)
            return self._transports[kind]

    def _connect(self, address: str, seconds: float) -> Connection:
        with self._lock:
            idle = self._idle.get(address)
            if idle:
                return idle.pop()
        return Connection(address, seconds)

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            self._idle.setdefault(connection.address, []).append(connection)
