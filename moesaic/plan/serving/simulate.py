"""Serving as discrete events: requests arrive, wait, are prefilled, decode together, finish; every step has its price.

What the closed estimate (`serving.py`) averages happens here one by one: a burst of arrivals, chunks of prompts beside
decoding sequences, a full cache, prefill workers that hand over to decode workers. Steps are priced by the same
`Serving.step`. Arrivals: a trace (any list of `Arrival`), Poisson, or clients that each keep one request under way.

    load = poisson(rate=4.0, count=500, prompt=1024, output=256, seed=0)
    done = simulate_serving(serving, load)
    done.attainment(ttft_ms=500, tpot_ms=30)
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.plan.serving.memory import CHUNK, sequence_bytes, sequences_that_fit
from moesaic.plan.serving.step import Batch, Serving

RUN = 16  # decode steps priced at once at most: a request that comes meanwhile is noticed after them


@dataclass(frozen=True)
class Arrival:
    second: float
    prompt: int
    output: int


@dataclass
class Request:
    arrival: Arrival
    left: int  # prompt tokens to prefill
    made: int = 0
    first: float = 0.0
    finished: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival.second

    @property
    def tpot(self) -> float:
        return (self.finished - self.first) / max(1, self.arrival.output - 1)

    @property
    def context(self) -> int:
        return self.arrival.prompt + self.made


@dataclass(frozen=True)
class ServingRun:
    """What a simulation found. Times in seconds."""

    requests: tuple[Request, ...]
    steps: int

    @property
    def seconds(self) -> float:
        return max(request.finished for request in self.requests) - self.requests[0].arrival.second

    @property
    def output_tokens_per_second(self) -> float:
        return sum(request.arrival.output for request in self.requests) / self.seconds

    def percentile(self, what: str, share: float) -> float:
        """Of `ttft` or `tpot`, in milliseconds."""
        values = sorted(float(getattr(request, what)) for request in self.requests)
        return values[min(len(values) - 1, int(share * len(values)))] * 1e3

    def mean(self, what: str) -> float:
        return sum(float(getattr(request, what)) for request in self.requests) / len(self.requests) * 1e3

    def attainment(self, ttft_ms: float, tpot_ms: float) -> float:
        """Share of requests that keep both objectives."""
        kept = sum(request.ttft * 1e3 <= ttft_ms and request.tpot * 1e3 <= tpot_ms for request in self.requests)
        return kept / len(self.requests)


def poisson(rate: float, count: int, prompt: int, output: int, seed: int, spread: float = 0.0) -> list[Arrival]:
    """`spread`: lengths lie evenly from (1 - spread) to (1 + spread) of those given."""
    if rate <= 0 or count < 1:
        raise UserError("arrivals", f"a rate of {rate} and {count} requests make no load", "Give both above zero.")
    random_ = random.Random(seed)
    made, second = [], 0.0
    for _ in range(count):
        second += random_.expovariate(rate)
        sizes = (max(1, round(size * random_.uniform(1 - spread, 1 + spread))) for size in (prompt, output))
        made.append(Arrival(second, *sizes))
    return made


@dataclass
class _Replica:
    """One replica of the attention: its queue, what it prefills and what it decodes."""

    serving: Serving
    capacity: float  # tokens of KV cache
    chunk: int
    prefills: bool = True
    decodes: bool = True
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    held: float = 0.0
    busy: bool = False
    steps: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.running)

    def admit(self) -> None:
        while self.waiting and len(self.running) + len(self.prefilling) < self.serving.engine.running:
            need = self.waiting[0].arrival.prompt + self.waiting[0].arrival.output
            if self.held + need > self.capacity and (self.running or self.prefilling):
                return
            request = self.waiting.popleft()
            self.held += need
            (self.prefilling if request.left else self.running).append(request)

    def begin(self, now: float, horizon: float) -> tuple[float, list[Request], list[Request]]:
        """One step (or a run of decode steps): when it ends, who then has a first token, who is finished."""
        self.admit()
        if self.prefilling:
            return self._prefill(now)
        return self._decode(now, horizon)

    def _prefill(self, now: float) -> tuple[float, list[Request], list[Request]]:
        budget, tokens, keys, first = self.chunk, 0, 0.0, []
        for request in list(self.prefilling):
            part = min(request.left, budget)
            if not part:
                break
            keys += part * (request.arrival.prompt - request.left + part / 2)
            tokens, budget, request.left = tokens + part, budget - part, request.left - part
            if not request.left:
                self.prefilling.remove(request)
                first.append(request)
        # Engines that mix let sequences decode in the same step; others make them wait.
        beside = self.running if self.serving.engine.mixed and self.decodes else []
        end = now + self.serving.step(Batch(len(beside), _context(beside), tokens, keys / tokens)).seconds
        self.steps += 1
        return end, first, self._advance(beside, 1, end)

    def _decode(self, now: float, horizon: float) -> tuple[float, list[Request], list[Request]]:
        batch = self.running
        least = min(request.arrival.output - request.made for request in batch)
        one = self.serving.step(Batch(len(batch), _context(batch))).seconds
        count = max(1, min(least, int(min(RUN, (horizon - now) / one + 1))))
        self.steps += count
        end = now + count * one
        return end, [], self._advance(batch, count, end)

    def _advance(self, batch: list[Request], count: int, end: float) -> list[Request]:
        finished = []
        for request in list(batch):
            request.made += count
            if request.made >= request.arrival.output:
                request.finished = end
                self.running.remove(request)
                self.release(request)
                finished.append(request)
        return finished

    def release(self, request: Request) -> None:
        self.held -= request.arrival.prompt + request.arrival.output


def _context(batch: Sequence[Request]) -> float:
    return sum(request.context for request in batch) / len(batch) if batch else 0.0


def simulate_serving(
    serving: Serving,
    arrivals: Iterable[Arrival],
    *,
    clients: int | None = None,
    workers: int = 1,
    prefill: Serving | None = None,
    prefill_workers: int = 1,
    chunk: int = CHUNK,
) -> ServingRun:
    """`clients`: a request is sent when one of theirs is answered, whatever second it names (they begin together).
    With `prefill`, those workers prefill and hand over; `serving`'s only decode."""
    waiting = deque(sorted(arrivals, key=lambda arrival: arrival.second))
    if not waiting:
        raise UserError("arrivals", "no request to serve")
    sizes = max(arrival.prompt + arrival.output for arrival in waiting)
    decoders = _replicas(serving, workers, chunk, sizes, prefills=prefill is None)
    prefillers = _replicas(prefill, prefill_workers, chunk, sizes, decodes=False) if prefill else decoders
    events: list[tuple[float, int, _Replica]] = []
    done: list[Request] = []
    number = 0

    def start(replica: _Replica, now: float) -> None:
        nonlocal number
        replica.busy = bool(replica.load)
        if not replica.busy:
            return
        horizon = waiting[0].second if waiting and clients is None else float("inf")
        end, first, finished = replica.begin(now, horizon)
        for request in first:
            request.first, request.made = end, 1
        number += 1
        heapq.heappush(events, (end, number, replica))
        ended.setdefault(number, (first, finished))

    def submit(arrival: Arrival, now: float) -> None:
        target = min(prefillers, key=lambda replica: replica.load)
        target.waiting.append(Request(arrival, arrival.prompt))
        if not target.busy:
            start(target, now)

    ended: dict[int, tuple[list[Request], list[Request]]] = {}
    if clients is not None:
        for _ in range(min(clients, len(waiting))):
            submit(_at(waiting.popleft(), 0.0), 0.0)
    while waiting or events:
        if clients is None and waiting and (not events or waiting[0].second <= events[0][0]):
            arrival = waiting.popleft()
            submit(arrival, arrival.second)
            continue
        now, key, replica = heapq.heappop(events)
        first, finished = ended.pop(key)
        for request in first:
            if request.arrival.output == 1:
                request.finished = now
                replica.release(request)
                finished.append(request)
            elif replica.decodes:
                replica.running.append(request)
            else:
                replica.release(request)
                target = min(decoders, key=lambda one: one.load)
                request.first += transfer(replica.serving, request.arrival.prompt)
                target.waiting.append(request)
                if not target.busy:
                    start(target, now)
        done.extend(finished)
        if clients is not None:
            for _ in finished:
                if waiting:
                    submit(_at(waiting.popleft(), now), now)
        start(replica, now)
    done.sort(key=lambda request: request.arrival.second)
    every = {id(replica): replica for replica in [*decoders, *prefillers]}
    return ServingRun(tuple(done), sum(replica.steps for replica in every.values()))


def transfer(serving: Serving, prompt: int) -> float:
    """Seconds to hand a prompt's KV cache over to the device that decodes."""
    return sequence_bytes(serving, prompt) / (serving.device.network * serving.device.network_share)


def _at(arrival: Arrival, second: float) -> Arrival:
    return Arrival(second, arrival.prompt, arrival.output)


def _replicas(
    serving: Serving, workers: int, chunk: int, longest: int, *, prefills: bool = True, decodes: bool = True
) -> list[_Replica]:
    capacity = max(1, sequences_that_fit(serving, longest)) * float(longest)
    return [_Replica(serving, capacity, chunk, prefills, decodes) for _ in range(workers * serving.layout.dp)]
