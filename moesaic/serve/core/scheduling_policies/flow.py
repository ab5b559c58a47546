"""FlowPrefill: a prefill is one forward, which gives way between two layers when something more urgent comes.

    moesaic serve DIR --policy flow itl=0.1

On a GPU layers are timed, and waited for, by CUDA events (`serve/core/device_timing.py`).

Decisions are taken only when something happens: a request arrives, a forward ends, the next token of a decoding request
falls due. Among prefills, those that can meet their TTFT deadlines by the predicted times go first, earliest deadline
first. When not all of them can, the longest give way until the others can (Moore and Hodgson's rule, which lets the
most jobs be in time), and run when there is time again; whatever has waited too long goes first all the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.prompt_logprobs import scored_budget
from moesaic.serve.core.request import Request
from moesaic.serve.core.scheduling_policies import Plan, SchedulingPolicy
from moesaic.serve.core.ttft_predictor import TTFTPredictor


@dataclass(frozen=True)
class Job:
    """A prefill, or the rest of a forward that was stopped."""

    work: Request | ForwardPass
    seconds: float  # it still takes
    due: float  # what is due sooner goes first
    latest: float  # when it is late; infinite where nobody named a deadline
    arrived: float
    priority: int


@dataclass(frozen=True)
class FlowPrefill(SchedulingPolicy):
    preempts: ClassVar[bool] = True

    itl: float = 0.1  # inter-token latency in seconds, while prefills wait
    stretch: float = 5.0  # a request without deadline should have its first token in so many times what it takes alone
    patience: float = 60.0  # seconds after which nothing goes before a request
    batch: int = 256  # tokens up to which short prefills are batched
    tokens: int = 8192  # a longer prompt takes several forwards, which bounds the memory of one
    prefill: TTFTPredictor = field(init=False, default_factory=TTFTPredictor, compare=False)
    decode: TTFTPredictor = field(init=False, default_factory=TTFTPredictor, compare=False)

    def __post_init__(self) -> None:
        if self.itl < 0 or self.stretch < 1 or self.patience < 0 or self.batch < 0 or self.tokens < 1:
            raise ValueError("itl, patience and batch must not be negative; stretch and tokens must be at least 1")

    def choose(self, requests: Sequence[Request], stopped: Sequence[ForwardPass], now: float) -> Plan | ForwardPass:
        decoding = [request for request in requests if request.decoding]
        jobs = [self._rest_of(work) for work in stopped]
        jobs += [self._prefill_of(request) for request in requests if not request.decoding]
        if decoding and (not jobs or self._due(decoding) <= now):
            return [(request, 1) for request in decoding]
        order = self._order(jobs, now)
        if order and isinstance(order[0].work, ForwardPass):
            return order[0].work
        return self._batched(order, now)

    def interrupts(self, running: ForwardPass, requests: Sequence[Request], now: float) -> bool:
        return not _only_decodes(running) and self.choose(requests, [running], now) is not running

    def next_event(self, running: ForwardPass, requests: Sequence[Request], now: float) -> float:
        decoding = [request for request in requests if request.decoding]
        return self._due(decoding) if decoding and not _only_decodes(running) else float("inf")

    def finished(self, done: ForwardPass) -> None:
        predictor = self.decode if _only_decodes(done) else self.prefill
        predictor.observe([(span.new, span.cached) for span in done.spans], done.seconds)

    def _due(self, decoding: Sequence[Request]) -> float:
        """When the next decode step must begin. At least half the time is left to prefills."""
        step = self.decode.seconds((1, request.computed) for request in decoding)
        return min(request.last_token or 0.0 for request in decoding) + max(self.itl - step, self.itl / 2)

    def _order(self, jobs: list[Job], now: float) -> list[Job]:
        """Who goes first: what has waited too long; then, in each class of priority, what can be in time; the rest."""
        order = sorted((job for job in jobs if now - job.arrived > self.patience), key=lambda job: job.arrived)
        jobs = [job for job in jobs if now - job.arrived <= self.patience]
        for priority in sorted({job.priority for job in jobs}):
            in_time, late = split_late([job for job in jobs if job.priority == priority], now)
            order += in_time + late
        return order

    def _batched(self, order: list[Job], now: float) -> Plan:
        """The first prefill, and those next in order as long as they are short and make nobody late."""
        plan: Plan = []
        spans: list[tuple[int, int]] = []
        end = float("inf")
        for job in order:
            if isinstance(job.work, ForwardPass):
                break
            most = scored_budget(self.tokens, len(order) > 1) if job.work.scores_prompt else self.tokens
            span = (min(job.work.pending, most), job.work.computed)
            if now + job.seconds <= job.latest:
                end = min(end, job.latest)
            fits = sum(new for new, _ in [*spans, span]) <= self.batch
            if plan and not (fits and now + self.prefill.seconds([*spans, span]) <= end):
                break
            plan.append((job.work, span[0]))
            spans.append(span)
        return plan

    def _prefill_of(self, request: Request) -> Job:
        cached = request.computed if request.pages else request.expected_cached
        seconds = self.prefill.seconds([(len(request.tokens) - cached, cached)])
        if request.deadline is not None and request.first_token is None:
            due = latest = request.deadline
        else:  # after its first token it may have been preempted, and computes again what it generated
            due = (request.last_token or request.arrived) + self.stretch * seconds
            latest = float("inf")
        return Job(request, seconds, due, latest, request.arrived, request.priority)

    def _rest_of(self, work: ForwardPass) -> Job:
        waiting = [chunk.request for chunk in work.chunks if chunk.request.finish_reason is None]
        jobs = [self._prefill_of(request) for request in waiting]
        whole = self.prefill.seconds((span.new, span.cached) for span in work.spans)
        return Job(
            work,
            seconds=whole * (1 - work.layer / len(work.model.layers)),
            due=min((job.due for job in jobs), default=float("inf")),
            latest=min((job.latest for job in jobs), default=float("inf")),
            arrived=min((job.arrived for job in jobs), default=float("inf")),
            priority=min((job.priority for job in jobs), default=0),
        )


def split_late(jobs: list[Job], now: float) -> tuple[list[Job], list[Job]]:
    """As many jobs as can be in time, by when they are due; and those that are late or would make others late."""
    kept: list[tuple[float, int, Job]] = []  # a heap, longest first
    late = []
    end = now
    for number, job in enumerate(sorted(jobs, key=lambda job: job.due)):
        heapq.heappush(kept, (-job.seconds, number, job))
        end += job.seconds
        if end > job.latest:
            longest = heapq.heappop(kept)[2]
            end -= longest.seconds
            late.append(longest)
    in_time = [job for _, _, job in sorted(kept, key=lambda entry: entry[1])]
    return in_time, sorted(late, key=lambda job: job.arrived)


def _only_decodes(work: ForwardPass) -> bool:
    """A decode step is short: nothing interrupts it."""
    return all(chunk.request.decoding for chunk in work.chunks)
