"""Run the forward of a step: here layer by layer, as on a CPU; `serve/gpu` has one that runs CUDA graphs and queues
steps ahead of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesaic.serve.core.forward_pass import Chunk, Forward, ForwardPass
from moesaic.serve.core.request import Output

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


class Runner:
    """Between any two layers the engine's inbox is read, and the scheduling policy may stop the forward."""

    verifies_trees = True  # whether the draft tokens of a request may be a tree

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def queued_outputs(self) -> list[Output] | None:
        """Outputs of steps that were queued ahead, while more are; None where the next step is to be scheduled."""
        return None

    def run(self, work: list[Chunk] | ForwardPass) -> Forward | None:
        """The finished forward of some chunks, or of a forward that was stopped before. None where there is nothing to
        run, or where it was stopped: the scheduler has it then."""
        engine = self.engine
        if isinstance(work, list):
            if not work:
                return None
            work = ForwardPass(engine.model, work, engine.cache, engine.version)
        if not self._run_layers(work):
            engine.scheduler.stopped.append(work)
            return None
        return work

    def _run_layers(self, forward: ForwardPass) -> bool:
        """Layer by layer; False if something more urgent came between."""
        engine, policy = self.engine, self.engine.scheduler.policy
        start, due = engine.clock(), float("-inf")
        while not forward.done:
            forward.advance()
            now = engine.clock()
            if (engine.inbox or now >= due) and not forward.done:
                engine.read_inbox()
                ready = engine.scheduler.ready()
                if engine.paused or not engine.needs(forward) or policy.interrupts(forward, ready, now):
                    break
                due = policy.next_event(forward, ready, now)
        forward.seconds += engine.clock() - start
        engine.counts.busy_seconds += engine.clock() - start
        if forward.done:
            policy.finished(forward)
        return forward.done
