"""Drive an engine: step it, sort its outputs by who submitted the request, and survive a step that fails.

    driver = EngineDriver[str](engine)
    driver.add(request, "mine")
    while request.finish_reason is None:
        for receiver, output in driver.step().outputs: ...

`Engine.generate`, the server's loop and the rollouts of RL all drive the engine through this. After an error of our own
nothing the engine holds can be trusted: all its requests are given up, their pages are freed and not shared, and the
engine serves on with whatever is added next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from moesaic.serve.core.request import Output, Request

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine

logger = logging.getLogger("moesaic.serve")

# Seconds until the next step, when there are requests of which none can be scheduled now.
RETRY = 0.005

Receiver = TypeVar("Receiver")


class EngineLost(Exception):
    """The engine cannot go on, and its process must end: a rank of its group is gone."""


@dataclass(frozen=True)
class Step(Generic[Receiver]):
    """What one step did for the receivers of its requests."""

    outputs: list[tuple[Receiver, Output]] = field(default_factory=list)
    idle: bool = False  # nothing was computed
    error: BaseException | None = None  # the step failed with this,
    lost: list[Receiver] = field(default_factory=list)  # and the requests of these were given up


class EngineDriver(Generic[Receiver]):
    """Belongs to the engine's thread. `on_outputs` is called with the outputs of every step."""

    def __init__(self, engine: Engine, on_outputs: Callable[[Sequence[Output]], None] | None = None) -> None:
        self.engine = engine
        self.on_outputs = on_outputs
        self._receivers: dict[int, tuple[Request, Receiver]] = {}

    @property
    def open(self) -> int:
        """Requests that were added and have not finished."""
        return len(self._receivers)

    def add(self, request: Request, receiver: Receiver) -> None:
        self.engine.add(request)
        self._receivers[request.number] = (request, receiver)

    def abort(self, request: Request) -> None:
        self._receivers.pop(request.number, None)
        self.engine.abort(request)

    def abort_all(self) -> None:
        for request, _ in list(self._receivers.values()):
            self.abort(request)

    def step(self) -> Step[Receiver]:
        """One step of the engine. Its failure is reported, not raised; only what ends the program is."""
        busy_seconds = self.engine.counts.busy_seconds
        try:
            outputs = self.engine.step()
            if self.on_outputs is not None:
                self.on_outputs(outputs)
        except BaseException as error:  # also the panics of libraries, which are no Exceptions
            lost = self._give_up()
            if isinstance(error, KeyboardInterrupt | SystemExit | EngineLost):
                raise
            return Step(error=error, lost=lost)
        delivered = [
            (self._receivers[output.request.number][1], output)
            for output in outputs
            if output.request.number in self._receivers
        ]
        for output in outputs:
            if output.finish_reason is not None:
                self._receivers.pop(output.request.number, None)
        return Step(delivered, idle=not outputs and self.engine.counts.busy_seconds == busy_seconds)

    def steps(self, wake: threading.Event, ended: Callable[[], bool]) -> Iterator[Step[Receiver]]:
        """One step after the other until `ended`; while there is nothing to do, the thread sleeps until `wake`."""
        while not ended():
            wake.clear()
            if not self.engine.working:
                wake.wait()
                continue
            step = self.step()
            if step.error is not None:
                logger.error("the engine failed; its requests are given up", exc_info=step.error)
            yield step
            if step.idle:
                wake.wait(RETRY)

    def _give_up(self) -> list[Receiver]:
        """Abort every request the engine holds, in a forward or not; whose they were."""
        scheduler = self.engine.scheduler
        scheduler.stopped.clear()
        for request in list(scheduler.requests.values()):
            request.end_forward()
            request.root = None  # so that its pages are freed, not shared
            request.finish_reason = request.finish_reason or "error"
            self.engine.abort(request)  # which also clears what a drafter holds for it
        lost = [receiver for _, receiver in self._receivers.values()]
        self._receivers.clear()
        return lost
