"""What the front and an engine say to each other, wherever the engine runs, and what one is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.errors import UserError

STALL_SECONDS = 20.0


@dataclass(frozen=True)
class EngineOptions:
    """`load_options` are for `load`, `engine_options` for `Engine`. With a `layout` the engine is a group of ranks;
    `kinds.py` says what kinds of engine there are."""

    directory: Path
    load_options: dict[str, Any] = field(default_factory=dict)
    engine_options: dict[str, Any] = field(default_factory=dict)
    layout: str = ""  # such as "tp=2 ep=2"
    stall_seconds: float = STALL_SECONDS  # of silence, after which a rank counts as dead
    role: str = ""  # what a routing strategy sends here
    devices: tuple[str, ...] = ()  # of its ranks; none: as `load_options` say


# Messages to the engine. Requests go by the numbers of their visits, which the front never uses twice.


class Add(NamedTuple):
    requests: list[tuple[int, dict[str, Any]]]


class Abort(NamedTuple):
    number: int


class Ask(NamedTuple):
    """A call of `EngineServer`'s method of that name, for a Reply."""

    ask: int
    method: str
    arguments: tuple[Any, ...] = ()


class Ping(NamedTuple):
    pass


class End(NamedTuple):
    pass


# Messages from the engine


class Ready(NamedTuple):
    pages: int  # of its KV cache
    page_size: int
    bytes: int = 0  # of weights and KV cache, of rank 0
    pids: tuple[int, ...] = ()


class Failed(NamedTuple):
    """Why it cannot start. Nothing follows."""

    problem: Exception

    @classmethod
    def by(cls, error: Exception) -> Failed:
        """Of errors only ours can be read at the other end for certain."""
        return cls(error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}"))


class Outputs(NamedTuple):
    """Of one step, as `serialize_output` writes them."""

    outputs: list[tuple[int, tuple[Any, ...]]]


class Lost(NamedTuple):
    """Requests that the engine gave up, and why; with `again` another try may succeed."""

    numbers: list[int]
    problem: str
    again: bool = False


class Handed(NamedTuple):
    """A visit is over and its request is not: the routing strategy, which is told `what`, sends it on."""

    number: int
    what: Any = None


class Reply(NamedTuple):
    ask: int
    result: Any = None
    problem: Exception | None = None


class Pong(NamedTuple):
    """A rank is there. Rank 0 says whether it has work, and how many steps it has done."""

    rank: int = 0
    working: bool = False
    steps: int = 0


ToEngine = Add | Abort | Ask | Ping | End
FromEngine = Ready | Failed | Outputs | Lost | Handed | Reply | Pong
