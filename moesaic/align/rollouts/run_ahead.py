"""SRT's run-ahead: in idle time, answer the questions that will probably be asked next, only so that the drafter has
something to guess from. What is written here is never learned from, and never seen by anybody but the drafter.

A draw is a hash of its seed and place. So an answer ahead is given the seed that the real one will have: under weights
that are a little newer, nearly all of its tokens come out the same, and where one does not, a guess was wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesaic.serve.core.engine import Counts, Engine
from moesaic.serve.core.request import Request
from moesaic.worlds.completions import requests_for
from moesaic.worlds.example import Example


class RunAhead:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, group: int, wishes: Mapping[str, Any]) -> None:
        self.engine, self.group, self.wishes = engine, group, wishes
        self.coming: deque[tuple[Example, int]] = deque()
        self.counts = Counts()  # what of the engine's work was done for this

    def foretold(self, coming: Sequence[tuple[Example, int]]) -> None:
        """Questions with their seeds, in the order in which they will be asked; older foretellings are forgotten."""
        self.coming = deque(coming)

    def run(self, until: Callable[[], bool]) -> None:
        """Answer what is foretold, one question at a time, until there is something better to do. What was written so
        far stays in the drafter's trees."""
        while self.coming and not until():
            example, seed = self.coming.popleft()
            try:
                requests = requests_for(self.engine, example, self.group, self.wishes, seed)
            except Exception:  # it will be told when the question is asked in earnest
                continue
            self._answer(requests, until)

    def _answer(self, requests: Sequence[Request], until: Callable[[], bool]) -> None:
        for request in requests:
            self.engine.add(request)
        try:
            while not until() and any(request.finish_reason is None for request in requests):
                self._step()
        finally:
            for request in requests:
                self.engine.abort(request)

    def _step(self) -> None:
        names = ("steps", "generated_tokens", "accepted_tokens")
        before = [getattr(self.engine.counts, name) for name in names]
        self.engine.step()
        for name, value in zip(names, before, strict=True):
            setattr(self.counts, name, getattr(self.counts, name) + getattr(self.engine.counts, name) - value)
