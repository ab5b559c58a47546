"""A worker: an engine somewhere else, as the front sees it, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from moesaic.serve.cluster.messages import EngineOptions, FromEngine, Ready, ToEngine
from moesaic.serve.cluster.prefix_routing import PrefixIndex
from moesaic.serve.core.stats import EngineStats
from moesaic.serve.group.rank_state import RankStats

if TYPE_CHECKING:
    from moesaic.serve.cluster.open_request import OpenRequest

Listener = Callable[[FromEngine | None], None]


class Worker(Protocol):
    """The processes of one engine. Methods return at once, but for `wait`, `kill` and `end`."""

    ranks: int

    def wait(self) -> Ready:
        """Until it is ready to serve; what keeps it from that is raised. Before `listen`, or not at all."""

    def listen(self, take: Listener) -> None:
        """From now on every message is given to `take`, on another thread; None when a rank has died."""

    def send(self, message: ToEngine) -> None:
        """To one that has died goes nothing. A Ping goes to every rank."""

    def kill(self) -> None:
        """All ranks, in whatever state they are."""

    def end(self) -> None:
        """Tell it to end, and kill what does not."""

    def why(self) -> str:
        """How it died, as far as that is known."""


class StartWorker(Protocol):
    def __call__(self, options: EngineOptions) -> Worker: ...

    def room(self, options: EngineOptions, like: Ready) -> bool:
        """Whether there is memory for one more worker of a kind that is running."""


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, and is given nothing new
    DEAD = "dead"  # to be restarted
    ENDED = "ended"


@dataclass(eq=False)
class WorkerHandle:
    """One worker through all its lives."""

    number: int
    options: EngineOptions
    weights: int = 0  # which of the weights that were served one after the other it has
    worker: Worker | None = None
    state: State = State.STARTING
    ready: Ready | None = None
    leaving: bool = False  # it drains, or will when it has been restarted
    problem: str = ""  # what kept it from starting last time
    deaths: int = 0
    failures: int = 0  # deaths in a row
    failed_starts: int = 0  # of them, before it was ready
    ready_since: float = 0.0
    served: bool = False  # whether a request has finished in this life
    heard: set[int] = field(default_factory=set)  # ranks that have said something,
    silence: dict[int, float] = field(default_factory=dict)  # and for how many seconds each has said nothing
    busy: float = 0.0  # seconds it has had work without finishing a step
    steps: int = 0
    open: dict[int, OpenRequest] = field(default_factory=dict)  # by the number of the visit
    pending_tokens: int = 0  # of them, to prefill and decode, at most
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    stats: EngineStats = field(default_factory=EngineStats)  # as last read
    rank_stats: list[RankStats] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)  # that it was told to load

    @property
    def page_size(self) -> int:
        return self.ready.page_size if self.ready is not None else 16

    def send(self, message: ToEngine) -> None:
        if self.worker is not None:
            self.worker.send(message)
