"""SRT's run-ahead: in idle time, complete the prompts that will probably be submitted next, only so that the drafter
has something to draft from. What is generated here is never trained on, and seen by nobody but the drafter.

A draw is a hash of its seed and place. So a completion ahead is given the seed that the real one will have: under
weights that are a little newer, nearly all of its tokens come out the same, and where one does not, a draft token is
rejected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request
from moesaic.worlds.completions import requests_for
from moesaic.worlds.example import Example


class RunAhead:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, group: int, sampling: Mapping[str, Any]) -> None:
        self.engine, self.group, self.sampling = engine, group, sampling
        self.coming: deque[tuple[Example, int]] = deque()
        self.work = EngineWork()  # what the engine did for this

    def announce(self, coming: Sequence[tuple[Example, int]]) -> None:
        """Prompts with their seeds, in the order in which they will be submitted, in place of those before."""
        self.coming = deque(coming)

    def run(self, until: Callable[[], bool]) -> None:
        """Complete what was announced, one prompt at a time, until there is something better to do. What was generated
        so far stays in the drafter's trees."""
        while self.coming and not until():
            example, seed = self.coming.popleft()
            try:
                requests = requests_for(self.engine, example, self.group, self.sampling, seed)
            except Exception:  # it is reported when the prompt is submitted in earnest
                continue
            self._complete(requests, until)

    def _complete(self, requests: Sequence[Request], until: Callable[[], bool]) -> None:
        for request in requests:
            self.engine.add(request)
        try:
            while not until() and any(request.finish_reason is None for request in requests):
                self._step()
        finally:
            for request in requests:
                self.engine.abort(request)

    def _step(self) -> None:
        before = EngineWork.of(self.engine)
        self.engine.step()
        self.work += EngineWork.of(self.engine) - before
