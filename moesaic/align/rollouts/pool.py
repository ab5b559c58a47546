"""Groups of answers under way in one engine. Whatever an answer waits for between or after its turns (tools, judges)
runs beside the engine, and what goes wrong with a group costs that group only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from moesaic.align.rewards import Judged, Reward, judge
from moesaic.align.rollouts.rollout import Sample, answer_of, sample_of
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer

BESIDE = 8  # tools and judges that run at the same time


class Answering:
    """One answer on its way. A plain one is over when the engine has written it."""

    def __init__(self, example: Example, request: Request) -> None:
        self.example, self.request, self.text = example, request, ""
        self.turns = False  # whether more may follow

    def next_turn(self) -> Request | None:
        """What to ask after the turn that has ended; not on the engine's thread."""
        return None

    def answer(self) -> Answer:
        return answer_of(self.example, self.request, self.text)

    def sample(self, judged: Judged) -> Sample:
        return sample_of(self.request, self.text, judged, self.example.question)


@dataclass(eq=False)
class _Group:
    answers: Sequence[Answering]
    open: int
    begun: list[Request] = field(default_factory=list)


Ended = tuple[int, list[Sample] | Exception]


class UnderWay:
    """`step` runs the engine once and returns the groups that have ended. All but `news` belongs to one thread."""

    def __init__(
        self, engine: Engine, rewards: Sequence[tuple[str, float, Reward]], judged_again: bool = False
    ) -> None:
        self.engine, self.rewards, self.judged_again = engine, rewards, judged_again
        self.groups: dict[int, _Group] = {}
        self.news = threading.Event()  # something outside the engine has happened
        self._of: dict[int, tuple[int, Answering]] = {}  # request -> whose it is
        self._beside = ThreadPoolExecutor(BESIDE, thread_name_prefix="beside")
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended: list[Ended] = []

    def add(self, number: int, answers: Sequence[Answering]) -> None:
        self.groups[number] = _Group(answers, len(answers))
        for answering in answers:
            self._begin(number, answering, answering.request)

    def give_up(self, number: int) -> None:
        group = self.groups.pop(number, None)
        for request in group.begun if group is not None else ():
            self._of.pop(request.number, None)
            self.engine.abort(request)

    def step(self) -> list[Ended]:
        self.news.clear()
        try:
            outputs = self.engine.step()
        except Exception as error:  # a mistake of our own; what the engine holds now is not to be trusted
            self.engine.scheduler.stopped.clear()
            for request in self.engine.scheduler.requests.values():
                request.busy, request.root = False, None  # so that its pages are freed, not shared
            for number in list(self.groups):
                self._fail(number, error)
            outputs = []
        for output in outputs:
            number, answering = self._of[output.request.number]
            answering.text += output.text
            if output.finish_reason is not None:
                del self._of[output.request.number]
                self._turn_ended(number, answering)
        while not self._done.empty():
            self._done.get()()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        for number in list(self.groups):
            self.give_up(number)
        self._beside.shutdown(wait=False, cancel_futures=True)

    def _begin(self, number: int, answering: Answering, request: Request) -> None:
        self._of[request.number] = (number, answering)
        self.groups[number].begun.append(request)
        self.engine.add(request)

    def _turn_ended(self, number: int, answering: Answering) -> None:
        if answering.turns:
            self._run_beside(number, answering.next_turn, lambda request: self._turn(number, answering, request))
        else:
            self._over(number)

    def _turn(self, number: int, answering: Answering, request: Request | None) -> None:
        if request is None:
            self._over(number)
        else:
            self._begin(number, answering, request)

    def _over(self, number: int) -> None:
        """One more answer of a group is whole; the last one sends the group to its judges."""
        group = self.groups[number]
        group.open -= 1
        if not group.open:
            self._run_beside(number, lambda: self._judge(group), lambda samples: self._end(number, samples))

    def _judge(self, group: _Group) -> list[Sample]:
        answers = [answering.answer() for answering in group.answers]
        verdicts = judge(self.rewards, answers)
        if self.judged_again:  # what was killed or hung once may do its work the second time
            troubled = [n for n, verdict in enumerate(verdicts) if verdict.problems]
            for n, verdict in zip(troubled, judge(self.rewards, [answers[n] for n in troubled]), strict=True):
                verdicts[n] = verdict
        return [answering.sample(verdict) for answering, verdict in zip(group.answers, verdicts, strict=True)]

    def _end(self, number: int, samples: list[Sample]) -> None:
        del self.groups[number]
        self._ended.append((number, samples))

    def _fail(self, number: int, error: Exception) -> None:
        self.give_up(number)
        self._ended.append((number, error))

    def _run_beside(self, number: int, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        group = self.groups[number]

        def finished(future: Future[Any]) -> None:
            if not future.cancelled():
                self._done.put(lambda: take(future))
                self.news.set()

        def take(future: Future[Any]) -> None:
            if self.groups.get(number) is not group:
                return  # given up meanwhile
            problem = future.exception()
            if problem is None:
                then(future.result())
            else:
                self._fail(number, problem if isinstance(problem, Exception) else RuntimeError(str(problem)))

        self._beside.submit(work).add_done_callback(finished)
