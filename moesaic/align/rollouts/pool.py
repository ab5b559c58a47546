"""Groups of completions in flight in one engine. What a completion waits for outside the engine (environment steps
between its turns, rewards after them) runs in threads beside it, and a failure costs no group but its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from moesaic.align.rewards import Judged, Reward, judge
from moesaic.align.rollouts.follow_ups import follow_ups, replied
from moesaic.align.rollouts.rollout import Sample, answer_of, sample_of
from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer

THREADS = 8  # environment steps and rewards that run at the same time


class Rollout:
    """One completion in flight. A single-turn one is over when the engine has finished its request."""

    def __init__(self, example: Example, request: Request) -> None:
        self.example, self.request, self.text = example, request, ""
        self.turns = False  # whether more may follow

    def next_turn(self) -> Request | None:
        """Take the environment step after the turn that has finished, and return the request of the next turn; not on
        the engine's thread."""
        return None

    def close(self) -> None:
        """Nobody waits for it any more. Called once or several times, from any thread."""

    def answer(self) -> Answer:
        return answer_of(self.example, self.request, self.text)

    def sample(self, judged: Judged) -> Sample:
        return sample_of(self.request, self.text, judged, self.example.question)


class FollowUp(Rollout):
    """What the policy replies to a question about completions that are whole."""

    def __init__(self, example: Example, request: Request, question: str) -> None:
        super().__init__(example, request)
        self.question = question


StartGroup = Callable[[Engine, Example, int], list[Rollout]]  # the rollouts of a group, from a seed


@dataclass(eq=False)
class _Group:
    """The completions of one prompt."""

    rollouts: Sequence[Rollout]
    open: int  # of them, not over yet
    requests: list[Request] = field(default_factory=list)  # of all turns so far
    answers: list[Answer] | None = None  # once they are all there
    follow_ups: dict[str, Request] = field(default_factory=dict)  # what rewards ask the policy of them, then
    replies: dict[str, str] = field(default_factory=dict)


Finished = tuple[int, list[Sample] | Exception]


class RolloutPool:
    """`step` runs the engine once and returns the groups that finished. All but `changed` belongs to one thread."""

    def __init__(
        self, engine: Engine, rewards: Sequence[tuple[str, float, Reward]], judged_again: bool = False
    ) -> None:
        self.engine, self.rewards, self.judged_again = engine, rewards, judged_again
        self.groups: dict[int, _Group] = {}
        self.changed = threading.Event()  # something outside the engine has happened
        self._driver: EngineDriver[tuple[int, Rollout]] = EngineDriver(engine)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rollout")
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: list[Finished] = []

    def add(self, number: int, rollouts: Sequence[Rollout]) -> None:
        self.groups[number] = _Group(rollouts, len(rollouts))
        for rollout in rollouts:
            self._submit(number, rollout, rollout.request)

    def give_up(self, number: int) -> None:
        group = self.groups.pop(number, None)
        for request in group.requests if group is not None else ():
            self._driver.abort(request)
        for rollout in group.rollouts if group is not None else ():
            self._threads.submit(rollout.close)  # it waits for a step under way

    def step(self) -> list[Finished]:
        self.changed.clear()
        step = self._driver.step()
        if step.error is not None:
            error = step.error if isinstance(step.error, Exception) else RuntimeError(str(step.error))
            for number in list(self.groups):
                self._fail(number, error)
        for (number, rollout), output in step.outputs:
            rollout.text += output.text
            if output.finish_reason is not None:
                self._turn_finished(number, rollout)
        while not self._done.empty():
            self._done.get()()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        left = [rollout for group in self.groups.values() for rollout in group.rollouts]
        for number in list(self.groups):
            self.give_up(number)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for rollout in left:
            rollout.close()

    def _submit(self, number: int, rollout: Rollout, request: Request) -> None:
        self.groups[number].requests.append(request)
        self._driver.add(request, (number, rollout))

    def _turn_finished(self, number: int, rollout: Rollout) -> None:
        if isinstance(rollout, FollowUp):
            self._replied(number, rollout)
        elif rollout.turns:
            self._run_beside(number, rollout.next_turn, lambda request: self._next_turn(number, rollout, request))
        else:
            self._rollout_over(number)

    def _next_turn(self, number: int, rollout: Rollout, request: Request | None) -> None:
        if request is None:
            self._rollout_over(number)
        else:
            self._submit(number, rollout, request)

    def _rollout_over(self, number: int) -> None:
        """One more completion of a group is whole; with the last one, and what rewards want to know of them all from
        the policy, its rewards are computed."""
        group = self.groups[number]
        group.open -= 1
        if group.open:
            return
        group.answers = [rollout.answer() for rollout in group.rollouts]
        group.follow_ups = follow_ups(self.engine, self.rewards, group.answers)
        for question, request in group.follow_ups.items():
            self._submit(number, FollowUp(group.rollouts[0].example, request, question), request)
        self._judge_when_asked(number, group)

    def _replied(self, number: int, follow_up: FollowUp) -> None:
        group = self.groups[number]
        group.replies[follow_up.question] = follow_up.text
        self._judge_when_asked(number, group)

    def _judge_when_asked(self, number: int, group: _Group) -> None:
        if len(group.replies) == len(group.follow_ups):
            self._run_beside(number, lambda: self._judge(group), lambda samples: self._group_over(number, samples))

    def _judge(self, group: _Group) -> list[Sample]:
        assert group.answers is not None
        answers = replied(group.answers, group.replies)
        verdicts = judge(self.rewards, answers)
        if self.judged_again:  # a reward whose process was killed or hung may succeed the second time
            troubled = [n for n, verdict in enumerate(verdicts) if verdict.problems]
            for n, verdict in zip(troubled, judge(self.rewards, [answers[n] for n in troubled]), strict=True):
                verdicts[n] = verdict
        return [rollout.sample(verdict) for rollout, verdict in zip(group.rollouts, verdicts, strict=True)]

    def _group_over(self, number: int, samples: list[Sample]) -> None:
        del self.groups[number]
        self._finished.append((number, samples))

    def _fail(self, number: int, error: Exception) -> None:
        self.give_up(number)
        self._finished.append((number, error))

    def _run_beside(self, number: int, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        group = self.groups[number]

        def finished(future: Future[Any]) -> None:
            if not future.cancelled():
                self._done.put(lambda: take(future))
                self.changed.set()

        def take(future: Future[Any]) -> None:
            if self.groups.get(number) is not group:
                return  # given up meanwhile
            problem = future.exception()
            if problem is None:
                then(future.result())
            else:
                self._fail(number, problem if isinstance(problem, Exception) else RuntimeError(str(problem)))

        self._threads.submit(work).add_done_callback(finished)
