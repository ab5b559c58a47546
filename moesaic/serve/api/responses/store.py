"""Responses that clients may come back to: each for its own API key, for a while, and no more of them than memory was
given. Where all of it is used, whoever uses most loses what was not asked for longest."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from moesaic.serve.api.errors import ApiError

OVERHEAD = 1024  # bytes of an entry beside its texts, about
ITEM_BYTES = 200  # of the place of an item


class Run(Protocol):
    """A response that is still generated."""

    done: bool

    def snapshot(self) -> dict[str, Any]: ...

    async def cancel(self) -> None: ...


@dataclass
class Stored:
    """`content` and `input` are JSON: as objects they would take several times the memory. `events` are what a stream
    of it said, where one may be resumed."""

    id: str
    owner: str
    previous: str | None
    input: bytes
    items: tuple[str, ...] = ()  # their ids, of input and output
    content: bytes = b""  # the response, once it has ended
    events: list[str] = field(default_factory=list)
    run: Run | None = None
    streamed: bool = False
    used: float = 0.0
    size: int = 0

    @property
    def running(self) -> bool:
        return self.run is not None and not self.run.done

    def response(self) -> dict[str, Any]:
        if self.run is not None and not self.content:
            return self.run.snapshot()
        return json.loads(self.content)


class ResponseStore:
    def __init__(self, max_bytes: int, max_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self.clock = clock
        self.bytes = 0
        self._owners: dict[str, OrderedDict[str, Stored]] = {}  # what was used longest ago comes first
        self._sizes: dict[str, int] = {}  # by owner
        self._places: dict[tuple[str, str], str] = {}  # of items, by their owner and id: in which response

    def __len__(self) -> int:
        return sum(len(own) for own in self._owners.values())

    @property
    def enabled(self) -> bool:
        return self.max_bytes > 0

    def add(self, stored: Stored) -> None:
        self._owners.setdefault(stored.owner, OrderedDict())[stored.id] = stored
        stored.used = self.clock()
        self.resize(stored)

    def resize(self, stored: Stored) -> None:
        """It has become larger, or has ended: others may have to make room."""
        if stored.id not in self._owners.get(stored.owner, ()):
            return  # deleted meanwhile
        self._places |= {(stored.owner, item): stored.id for item in stored.items}
        size = OVERHEAD + len(stored.input) + len(stored.content) + sum(map(len, stored.events))
        size += ITEM_BYTES * len(stored.items)
        self._count(stored.owner, size - stored.size)
        stored.size = size
        self._evict()

    def get(self, owner: str, name: str) -> Stored:
        """Another's response does not exist."""
        self._evict()
        stored = self._owners.get(owner, OrderedDict()).get(name)
        if stored is None:
            raise not_found(name)
        self._use(stored)
        return stored

    def items(self, owner: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Items of responses, by their ids; each response is read once, however many of its items are asked for."""
        found: dict[str, dict[str, Any]] = {}
        for name in names:
            place = self._places.get((owner, name))
            if name not in found and place is not None:
                stored = self.get(owner, place)
                found |= {item["id"]: item for item in (*json.loads(stored.input), *stored.response()["output"])}
            if name not in found:
                raise ApiError(404, f"Item with id {name[:64]!r} not found", param="input", code="item_not_found")
        return found

    def chain(self, owner: str, name: str) -> list[Stored]:
        """A response and all those that it continues, the first one first."""
        found: list[Stored] = []
        at: str | None = name
        while at is not None:
            try:
                stored = self.get(owner, at)
            except ApiError as error:
                own = f"Previous response with id {name[:64]!r} not found"
                message = own if at == name else f"{own}: it continues {at!r}, which is not kept any more"
                code = "previous_response_not_found"
                raise ApiError(error.status, message, param="previous_response_id", code=code) from None
            found.append(stored)
            at = stored.previous
        return found[::-1]

    def delete(self, owner: str, name: str) -> Stored:
        stored = self.get(owner, name)
        self._remove(stored)
        return stored

    async def close(self) -> None:
        """The server ends, and what it was still generating with it."""
        running = [stored.run for stored in self._all() if stored.running and stored.run is not None]
        await asyncio.gather(*(run.cancel() for run in running))

    def _all(self) -> Iterator[Stored]:
        for own in list(self._owners.values()):
            yield from list(own.values())

    def _use(self, stored: Stored) -> None:
        stored.used = self.clock()
        self._owners[stored.owner].move_to_end(stored.id)

    def _remove(self, stored: Stored) -> None:
        own = self._owners[stored.owner]
        del own[stored.id]
        self._count(stored.owner, -stored.size)
        for item in stored.items:
            if self._places.get((stored.owner, item)) == stored.id:
                del self._places[stored.owner, item]
        if not own:
            del self._owners[stored.owner], self._sizes[stored.owner]

    def _count(self, owner: str, size: int) -> None:
        self.bytes += size
        self._sizes[owner] = self._sizes.get(owner, 0) + size

    def _evict(self) -> None:
        """By age, then by size. One that is still generated stays: the queue bounds how many there are."""
        old = self.clock() - self.max_seconds
        for own in list(self._owners.values()):
            while own and (first := next(iter(own.values()))).used < old and not first.running:
                self._remove(first)
        while self.bytes > self.max_bytes:
            largest = sorted(self._sizes, key=self._sizes.__getitem__, reverse=True)
            ended = (stored for owner in largest for stored in self._owners[owner].values() if not stored.running)
            first_ended = next(ended, None)
            if first_ended is None:
                return
            self._remove(first_ended)


def not_found(name: str) -> ApiError:
    return ApiError(404, f"Response with id {name[:64]!r} not found", param="response_id", code="response_not_found")
