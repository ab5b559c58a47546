"""Pages outside of the KV cache: evicted ones go to host memory, from there to disk, and come back by name; others have
been computed by another engine, and are asked for there.

    Engine(model, tiers=TierOptions(host_bytes=8 << 30, disk_bytes=100 << 30, directory=Path("cache")))

What is in host memory comes back when a request is admitted. What is on disk or elsewhere is brought by another thread
as soon as the request arrives, while others run; it waits for that at most `page_seconds`, and computes what has not
come. Writing to disk happens on a thread too; when that cannot keep up, pages are dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.serve.pages.channel import ChannelBroken
from moesaic.serve.pages.disk_tier import DiskTier
from moesaic.serve.pages.host_tier import HostTier
from moesaic.serve.pages.identity import identity_of_model, namespace
from moesaic.serve.pages.incoming import Incoming, Lobby, Pieces
from moesaic.serve.pages.names import PageNames, page_name
from moesaic.serve.pages.page_bytes import PageBytes
from moesaic.serve.pages.remote import Origin, RemotePages

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.page_pool import PagePool
    from moesaic.serve.core.request import Request
    from moesaic.serve.pages.server import PageServer

logger = logging.getLogger("moesaic.serve")

MAX_WRITES = 64  # pages that wait to be written to disk
READERS = 8  # threads that read from disk, and ask other engines
LOBBY = 1 << 30  # bytes of pages that may wait for their requests


@dataclass(frozen=True)
class TierOptions:
    """Bounds of the tiers below the KV cache; 0 is none. They hold for each engine. With `travel` pages are also known
    to other engines of the same weights."""

    host_bytes: int = 0
    disk_bytes: int = 0
    directory: Path | None = None
    travel: bool = False
    host: str = "127.0.0.1"  # where other engines ask for pages; auto: at this machine's own address
    transport: str = "distributed"
    page_seconds: float = 5.0  # that a request waits for its pages

    def __post_init__(self) -> None:
        if self.disk_bytes and self.directory is None:
            raise UserError("--cache-disk-gb", "needs a directory", "Give --cache-dir.")
        if self.directory is not None and not self.disk_bytes:
            raise UserError("--cache-dir", "needs a size", "Give --cache-disk-gb.")


@dataclass
class OutsideCounts:
    """Tokens that came back, by where they were, and pages that went there."""

    host_tokens: int = 0
    disk_tokens: int = 0
    spilled_pages: int = 0
    dropped_pages: int = 0  # because the disk was slower
    transferred_tokens: int = 0  # that came from another engine
    recomputed_tokens: int = 0  # that should have come from another engine
    failed_transfers: int = 0


class OutsidePages:
    """Belongs to the engine's thread, but for what `_read` and `_write` do. `pool` has names."""

    server: PageServer | None = None  # that gives pages to others, where it was started with this

    def __init__(
        self, pool: PagePool, options: TierOptions, clock: Callable[[], float], heads: range | None = None
    ) -> None:
        self.pool, self.options, self.clock = pool, options, clock
        self.bytes = PageBytes(pool.cache, heads)
        self.page_bytes = self.bytes.size()
        device = next(iter(pool.cache.layers[0].values())).device
        self.on_gpu = device.type == "cuda"
        self.counts = OutsideCounts()
        self.lobby = Lobby(max(LOBBY, options.host_bytes))
        self.disk = DiskTier(options.directory, options.disk_bytes) if options.directory is not None else None
        spill = self._to_disk if self.disk is not None else None
        self.host = HostTier(options.host_bytes, self.page_bytes, self.on_gpu, spill) if options.host_bytes else None
        self.remote = RemotePages(self.bytes, self.on_gpu)
        self._writer = ThreadPoolExecutor(1, "page writer")
        self._readers = ThreadPoolExecutor(READERS, "page reader")
        self._writing: dict[bytes, Tensor] = {}
        self._lock = threading.Lock()

    # What a pool asks

    def find(self, request: Request, name: bytes) -> tuple[str, Pieces] | None:
        if request.incoming is not None and (found := request.incoming.take(name)) is not None:
            return found
        if self.host is not None and (data := self.host.get(name)) is not None:
            return "host", [(None, data)]
        return None

    def write(self, request: Request, page: int, found: tuple[str, Pieces], tokens: int) -> None:
        source, pieces = found
        for box, data in pieces:
            self.bytes.write([page], data[None], box)
        if source == "host":
            self.counts.host_tokens += tokens
        elif source == "disk":
            self.counts.disk_tokens += tokens
        else:
            request.transferred += tokens
            self.counts.transferred_tokens += tokens

    def admitted(self, request: Request) -> None:
        if request.incoming is None:
            return
        if request.origin is not None and not request.incoming.closed:
            request.recomputed = len(request.tokens) - 1 - request.computed
            self.counts.recomputed_tokens += request.recomputed
        request.incoming.close()

    def evicted(self, name: bytes, page: int) -> None:
        if self.host is not None:
            if (slot := self.host.new(name)) is not None:
                self.bytes.read([page], out=slot[None])
                self.counts.spilled_pages += 1
        elif self.disk is not None and name not in self.disk:
            self._to_disk(name, self.bytes.read([page])[0])
            self.counts.spilled_pages += 1

    # Around a request

    def begin(self, request: Request) -> None:
        """A request has come: what of it is on disk is read, and what another engine has is asked for."""
        if request.recomputes_prompt or request.root is None:
            return
        names = self.missing(request)
        on_disk = self.disk is not None and any(name in self.disk or name in self._writing for name in names)
        if on_disk or request.origin is not None:
            request.incoming = self.new_incoming(request, names)
            self._readers.submit(self._read, request.incoming, names, request.origin)

    def new_incoming(self, request: Request, names: list[bytes]) -> Incoming:
        return Incoming(self.lobby, self.clock() + self.options.page_seconds, self.clock)

    def missing(self, request: Request) -> list[bytes]:
        """The names of a request's pages that are in none of the memories here, and of its last one, partly filled,
        where another engine may have it."""
        pool, tokens = self.pool, request.tokens[:-1]
        assert pool.names is not None
        names = list(pool.names.of_prompt(request.root, tokens, pool.size))
        if request.origin is not None and (rest := len(tokens) % pool.size):
            names.append(page_name(names[-1] if names else pool.names.root(request.root), tokens[-rest:]))
        if self.host is None:
            return [name for name in names if name not in pool.nodes]
        # Those in host memory are used now: they do not give way to what this request evicts.
        return [name for name in names if name not in pool.nodes and self.host.get(name) is None]

    def stats(self) -> dict[str, int]:
        return vars(self.counts) | {
            "transferred_bytes": self.remote.received,
            "cache_host_bytes": self.host.used_bytes if self.host is not None else 0,
            "cache_disk_bytes": self.disk.bytes if self.disk is not None else 0,
        }

    def flush(self) -> None:
        """Wait until all that goes to disk is there."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """What is in memory goes to disk too, as far as there is room, for an engine that starts later."""
        if self.disk is not None:
            for name, data in self.host.items() if self.host is not None else ():
                self.disk.put(name, data)
            for name, node in list(self.pool.nodes.items()):
                if len(node.tokens) == self.pool.size and node.root is not None:
                    self.disk.put(name, self.bytes.read([node.page])[0].cpu())
        self._writer.shutdown()
        self._readers.shutdown()
        self.remote.close()
        if self.disk is not None:
            self.disk.close()

    # Disk

    def _to_disk(self, name: bytes, data: Tensor) -> None:
        """On the engine's thread; `data` may be used for another page as soon as this returns."""
        assert self.disk is not None
        if name in self.disk:
            return
        with self._lock:
            if len(self._writing) >= MAX_WRITES:
                self.counts.dropped_pages += 1
                return
            if self.on_gpu:  # the copy from the device may be under way
                torch.cuda.current_stream().synchronize()
            self._writing[name] = data.cpu().clone()
        self._writer.submit(self._write, name)

    def _write(self, name: bytes) -> None:
        assert self.disk is not None
        try:
            self.disk.put(name, self._writing[name])
        finally:
            with self._lock:
                del self._writing[name]

    def _read(self, incoming: Incoming, names: list[bytes], origin: Origin | None) -> None:
        """Page after page, until one is missing: what comes behind it is of no use."""
        try:
            names = self._read_disk(incoming, names)
            if origin is not None:
                self._read_remote(incoming, names, origin)
        except ChannelBroken as error:
            self.counts.failed_transfers += 1
            logger.warning("pages did not come from another engine, and are computed: %s", error)
        except Exception:  # of ours; the request goes on without
            logger.exception("pages could not be read")
        finally:
            incoming.done = True

    def _read_disk(self, incoming: Incoming, names: list[bytes]) -> list[bytes]:
        """What is left of the names."""
        for number, name in enumerate(names if self.disk is not None else ()):
            assert self.disk is not None
            data = self._writing.get(name)
            if data is None:
                data = self.disk.get(name, self.page_bytes)
            if data is None or not incoming.awaited or not incoming.add(name, "disk", [(None, data)]):
                return names[number:]
        return names if self.disk is None else []

    def _read_remote(self, incoming: Incoming, names: list[bytes], origin: Origin) -> None:
        def left() -> float:
            return incoming.until - self.clock()

        if not names:
            self.remote.end_lease(origin, left())
            return
        pages = self.remote.fetch(origin, names, left)
        for name, pieces in pages:
            if not incoming.awaited or not incoming.add(name, "remote", pieces):
                pages.close()
                return


def outside_pages(engine: Engine, options: TierOptions | None, weights: str | None) -> OutsidePages | None:
    """What an engine with tiers has, with names for its pages. `weights` is their identity, where it is known."""
    if options is None or not (options.host_bytes or options.disk_bytes or options.travel):
        return None
    pool = engine.page_pool
    if not pool.reuse:
        problem = "there are no pages to bring back without a prefix cache, and a KV policy has none"
        raise UserError("--cache-host-gb, --cache-disk-gb, --prefill", problem, "Leave them out.")
    if weights is None:  # of use to this process alone, unless pages outlive it
        weights = identity_of_model(engine.model) if options.disk_bytes or options.travel else ""
    pool.names = PageNames(namespace(weights, engine.model, engine.cache))
    pool.outside = found = OutsidePages(pool, options, engine.clock)
    return found
