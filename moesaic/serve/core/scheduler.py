"""Give some requests some tokens, within the pages there are.

Every request has tokens and computed tokens, and the difference is to be computed. The scheduling policy chooses among
requests; here pages are allocated: cached prefixes first, free pages next, and if there are none, those of the least
urgent request, which will be computed again (preemption by recomputation).
"""

from __future__ import annotations

from collections.abc import Hashable

from moesaic.serve.core.forward_pass import Chunk, ForwardPass
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request
from moesaic.serve.core.scheduling_policies import Plan, SchedulingPolicy


class Scheduler:
    def __init__(self, page_pool: PagePool, policy: SchedulingPolicy, max_requests: int) -> None:
        self.page_pool = page_pool
        self.policy = policy
        self.max_requests = max_requests  # that hold pages at the same time
        self.requests: dict[int, Request] = {}
        self.stopped: list[ForwardPass] = []
        self.preemptions = 0
        self.running: dict[Hashable, list[Request]] = {}  # requests that hold pages, by their first page of tokens

    def schedule(self, now: float) -> list[Chunk] | ForwardPass:
        """What to run next: a stopped forward, or some tokens for some requests. Nothing, if all wait."""
        ready = self.ready()
        chosen = self.policy.choose(ready, self.stopped, now)
        if not isinstance(chosen, ForwardPass):
            chunks = self.find_pages(chosen)
            if chunks or not chosen:
                return chunks
            # No pages for any of them, so whoever holds pages must go on: a stopped forward needs no more of them, and
            # if there is none, the most urgent request can take those of all others.
            if not self.stopped:
                holding = sorted((one for one in ready if one.pages), key=lambda one: one.urgency)
                return self.find_pages([(request, request.pending) for request in holding])
            chosen = self.stopped[0]
        self.stopped.remove(chosen)
        return chosen

    def find_pages(self, plan: Plan) -> list[Chunk]:
        """As much of a plan as pages can be allocated for."""
        chunks: list[Chunk] = []
        for request, count in plan:
            # Siblings that come together: one of them computes the prefix, the others wait for its pages.
            if not request.pages:
                if self.prefix_in_flight(request) or not self.admit(request):
                    continue
                self.running.setdefault(self.first_page(request), []).append(request)
            count = min(count, request.pending)
            if request.windows is not None:
                count = request.windows.within(request.computed, count)
            chunk = Chunk(request, self.page_pool.tokens_until_pruning(request, count))
            while not self.page_pool.grow(request, request.computed + chunk.rows):
                victim = self.victim(request, chunks)
                if victim is None:
                    break
                self.preempt(victim)
            else:
                chunks.append(chunk)
        return chunks

    def ready(self) -> list[Request]:
        """Requests with tokens to compute, in no forward: the running ones, and waiting ones up to `max_requests`."""
        idle = [
            request
            for request in self.requests.values()
            if not request.in_forward and request.pending and (request.incoming is None or not request.incoming.awaited)
        ]
        running = [request for request in idle if request.pages]
        waiting = sorted((request for request in idle if not request.pages), key=lambda request: request.urgency)
        holding = [request for request in self.requests.values() if request.pages] if waiting else []
        slots = max(0, self.max_requests - len(holding))
        self.running.clear()
        for request in holding:
            self.running.setdefault(self.first_page(request), []).append(request)
        return running + [request for request in waiting[: slots + 8] if not self.prefix_in_flight(request)][:slots]

    def prefix_in_flight(self, request: Request) -> bool:
        """Whether a more urgent request is computing a prefix of this one: waiting for it is cheaper."""
        size = self.page_pool.size
        if not self.page_pool.reuse or request.recomputes_prompt:
            return False
        for other in self.running.get(self.first_page(request), ()):
            place = other.computed // size * size
            ahead = min(len(other.tokens), len(request.tokens) - 1) // size * size
            if place < ahead and other.pages and other.urgency < request.urgency:
                if other.tokens[: place + size] == request.tokens[: place + size]:
                    self.page_pool.waits_for(request, other)
                    return True
        return False

    def first_page(self, request: Request) -> Hashable:
        """Requests of which this differs share no page."""
        return request.root, request.data_rank, tuple(request.tokens[: self.page_pool.size])

    def admit(self, request: Request) -> bool:
        """Give a waiting request its cached prefix, if all its tokens fit without preempting a more urgent one."""
        others = [o for o in self.requests.values() if o.pages and o.data_rank == request.data_rank]
        self.page_pool.match_prefix(request, others)
        self.page_pool.meets(request, self.requests.values())
        if not request.preemptions and not request.written:
            request.cached = request.computed
        missing = -(-len(request.tokens) // self.page_pool.size) - len(request.pages)
        if not self.page_pool.make_room(request, missing) and not any(
            other.urgency > request.urgency for other in others
        ):
            self.page_pool.release(request)
            return False
        if self.page_pool.outside is not None:
            self.page_pool.outside.admitted(request)
        # Only now: a waiting one is looked up again before every step.
        self.page_pool.queries += len(request.tokens) - 1
        self.page_pool.hits += request.computed
        return True

    def victim(self, request: Request, chunks: list[Chunk]) -> Request | None:
        """The least urgent request that may be preempted for this one."""
        safe = {chunk.request.number for chunk in chunks} | {request.number}
        others = [
            other
            for other in self.requests.values()
            if other.pages and not other.in_forward and other.number not in safe
            if other.data_rank == request.data_rank
        ]
        last = max(others, key=lambda other: other.urgency, default=None)
        return last if last is not None and last.urgency > request.urgency else None

    def preempt(self, request: Request) -> None:
        self.page_pool.release(request)
        request.clear_records()
        request.preemptions += 1
        self.preemptions += 1

    def remove(self, request: Request, lease: tuple[str, float] | None = None) -> None:
        self.requests.pop(request.number, None)
        if request.incoming is not None:
            request.incoming.close()
        self.page_pool.release(request, lease)
