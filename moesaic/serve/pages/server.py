"""Gives an engine's pages to other processes, by name, while it serves on.

    server = PageServer(engine)       server.address is told to others; `remote.py` asks there

Asked for names, the engine's thread pins what it has of them between two steps, so that nothing is written there;
another thread reads the bytes and sends them. A pin goes with its channel. Where an engine is a group of ranks the
first of them knows the tree, and the others (`RankPages`) give boxes of the pages they are told. Whoever can reach the
address can read pages: it is for the machines of one service.

Leases that nobody came for end here too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from moesaic.serve.pages.channel import DAY, PATIENCE, Channel, ChannelBroken, Door
from moesaic.serve.pages.page_bytes import PageBytes
from moesaic.serve.pages.remote import Rank
from moesaic.serve.pages.transport import transport

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine

logger = logging.getLogger("moesaic.serve")

BLOCK = 32 << 20  # bytes that are sent at a time
LEASES = 0.25  # seconds between two looks at leases


class RankPages:
    """Those of one rank, by their numbers: `pins` knows them by name too, where this is the first."""

    def __init__(
        self, pages: PageBytes, host: str = "127.0.0.1", pins: Pins | None = None, kind: str = "distributed"
    ) -> None:
        self.pages, self.pins = pages, pins
        self.by = transport(kind)
        self.sent = 0  # bytes
        self.door = Door(host)
        threading.Thread(target=self._accept, name="pages asked for", daemon=True).start()

    @property
    def address(self) -> str:
        return self.door.address

    def _accept(self) -> None:
        while (store := self.door.next()) is not None:
            threading.Thread(target=self._serve, args=(store,), name="pages sent", daemon=True).start()

    def _serve(self, store: Any) -> None:
        pinned: set[str] = set()
        try:
            channel = Channel(store, 0, PATIENCE)
            channel.say({"transport": self.by.name})
            while True:
                self._answer(channel, channel.hear(DAY), pinned)
        except (ChannelBroken, KeyError, TypeError, ValueError, IndexError) as error:
            logger.debug("a channel for pages ended: %s", error)
        finally:
            for pin in pinned:
                assert self.pins is not None
                self.pins.end(pin)

    def _answer(self, channel: Channel, asked: dict[str, Any], pinned: set[str]) -> None:
        if self.pins is not None and "pin" in asked:
            pin, pages = self.pins.pin([bytes.fromhex(name) for name in asked["pin"]])
            pinned.add(pin)
            channel.say({"pin": pin, "pages": pages})
        elif self.pins is not None and "end" in asked:
            for name in asked["end"]:
                pinned.discard(name)
                self.pins.end(name)
        else:
            box = range(*asked["box"]) if asked["box"] is not None else None
            data = self.pages.read(asked["read"], box).cpu()
            channel.say({"bytes": data.shape[1]})
            self.by.send(channel, data)
            self.sent += data.nbytes


class Pins:
    """Pages of an engine that are being read; all of it happens on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._own = os.urandom(4).hex()

    def pin(self, names: list[bytes]) -> tuple[str, list[int]]:
        """As many of the first of these pages as are there."""
        name = f"pin-{self._own}-{next(self._numbers)}"
        pool = self.engine.page_pool

        def take() -> list[int]:
            nodes = list(itertools.takewhile(lambda node: node is not None, (pool.nodes.get(one) for one in names)))
            found = [node for node in nodes if node is not None]
            pool.hold(name, found, float("inf"))
            return [node.page for node in found]

        try:
            return name, self._wait_for(take)
        except ChannelBroken:
            self.end(name)
            raise

    def end(self, name: str) -> None:
        """A pin, or a lease."""
        self.engine.call(partial(self.engine.page_pool.end_lease, name))

    def end_leases(self) -> None:
        if self.engine.page_pool.leases:
            self.engine.call(lambda: self.engine.page_pool.end_leases(self.engine.clock()))

    def _wait_for(self, function: Callable[[], list[int]]) -> list[int]:
        done, found = threading.Event(), []

        def run() -> None:
            with contextlib.suppress(Exception):
                found.append(function())
            done.set()

        self.engine.call(run)
        if not done.wait(PATIENCE) or not found:
            raise ChannelBroken("the engine does not answer")
        return found[0]


class PageServer(RankPages):
    def __init__(self, engine: Engine, host: str = "127.0.0.1", kind: str = "distributed") -> None:
        heads = engine.outside.bytes.heads if engine.outside is not None else None
        super().__init__(PageBytes(engine.cache, heads), host, Pins(engine), kind)
        self._ended = threading.Event()
        threading.Thread(target=self._end_leases, name="page leases", daemon=True).start()

    def _end_leases(self) -> None:
        assert self.pins is not None
        while not self._ended.wait(LEASES):
            self.pins.end_leases()

    def ranks(self) -> tuple[Rank, ...]:
        """Where others ask, the first for names."""
        return (Rank(self.address, self.pages.heads.start, self.pages.heads.stop),)

    def close(self) -> None:
        self._ended.set()
        self.door.close()


def page_server(engine: Engine) -> PageServer | None:
    """For an engine whose pages travel."""
    if engine.outside is None or not engine.outside.options.travel:
        return None
    options = engine.outside.options
    return engine.outside.server or PageServer(engine, own_host(options.host), options.transport)


def own_host(host: str) -> str:
    return socket.gethostbyname(socket.gethostname()) if host == "auto" else host
