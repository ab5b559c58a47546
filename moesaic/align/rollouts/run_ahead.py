"""SRT's run-ahead: in idle time, complete the prompts that will probably be submitted next, only so that the drafter
has something to draft from. What is generated here is never trained on, and seen by nobody but the drafter.

A draw is a hash of its seed and place. So a completion ahead is given the seed that the real one will have: under
weights that are a little newer, nearly all of its tokens come out the same, and where one does not, a draft token is
rejected. Worlds answer the same actions with the same words, so this holds for all turns of an episode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.pool import RolloutPool, StartGroup
from moesaic.serve.core.engine import Engine
from moesaic.worlds.example import Example

GLANCE = 0.01  # seconds between looks at whether there is something better to do, while a world takes its time


class RunAhead:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, start_group: StartGroup) -> None:
        self.engine, self.start_group = engine, start_group
        self.pool = RolloutPool(engine, [])
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
                self.pool.add(0, self.start_group(self.engine, example, seed))
            except Exception:  # it is reported when the prompt is submitted in earnest
                continue
            self._complete(until)

    def _complete(self, until: Callable[[], bool]) -> None:
        try:
            while not until() and self.pool.groups:
                before = EngineWork.of(self.engine)
                self.pool.step()
                self.work += EngineWork.of(self.engine) - before
                if not self.engine.working and self.pool.groups:
                    self.pool.changed.wait(GLANCE)
        finally:
            self.pool.give_up(0)
