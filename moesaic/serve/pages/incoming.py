"""Pages on their way to one request: it waits for them before it gets pages of its own, but not longer than agreed.

Another thread brings them; what has come by then is written to the KV cache when the request is admitted. What has not
is computed. Pages wait in a `Lobby` of so many bytes, so that a long queue of requests takes no more memory than that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

# A page's bytes: all of it (None), or boxes of its key heads that came from several ranks.
Pieces = list[tuple[range | None, Tensor]]


@dataclass(eq=False)
class Incoming:
    """`pages` are by name, with where they are from."""

    lobby: Lobby
    until: float  # by the clock
    clock: Callable[[], float]
    pages: dict[bytes, tuple[str, Pieces]] = field(default_factory=dict)
    done: bool = False  # nothing more comes
    closed: bool = False  # nothing more is wanted
    last: bytes = b""  # the name of what was taken last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def awaited(self) -> bool:
        return not self.done and self.clock() < self.until

    def add(self, name: bytes, source: str, data: Pieces) -> bool:
        """From another thread: one more page; False if it is not wanted any more, or there is no room for it."""
        if not self.lobby.enter(_bytes(data)):
            return False
        with self._lock:
            if not self.closed and name not in self.pages:
                self.pages[name] = (source, data)
                return True
        self.lobby.leave(_bytes(data))
        return False

    def take(self, name: bytes) -> tuple[str, Pieces] | None:
        with self._lock:
            found, self.last = self.pages.pop(name, None), name
        if found is not None:
            self.lobby.leave(_bytes(found[1]))
        return found

    def close(self) -> None:
        """The request has been admitted or has gone: what was not taken is dropped."""
        with self._lock:
            self.done = self.closed = True
            left, self.pages = self.pages, {}
        for _, data in left.values():
            self.lobby.leave(_bytes(data))


class Lobby:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._lock = threading.Lock()

    def enter(self, count: int) -> bool:
        with self._lock:
            if self.bytes + count > self.max_bytes:
                return False
            self.bytes += count
            return True

    def leave(self, count: int) -> None:
        with self._lock:
            self.bytes -= count


def _bytes(pieces: Pieces) -> int:
    return sum(data.nbytes for _, data in pieces)
