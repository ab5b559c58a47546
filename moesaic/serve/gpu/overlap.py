"""The engine's step on a GPU: queue the next step before the last one's tokens are known, so the device never waits.

A request whose next token is chosen on the device can be given its next step at once: only that token is unknown, and
it is already where the next step reads it. Such requests form a cohort (`cuda_cohort.py`) that goes on by itself; the
scheduler sees to the others, and keeps off those in the cohort because they are busy. What the host learns one step
late is that a request has ended; the step it was still part of is then thrown away. All steps run in one stream, in the
order in which they were queued, so pages and slots can change hands without waiting.

Requests whose wishes are not those of the device (a grammar, penalties, top-p) get their logits, are chosen for on the
host, and take part in every second step. Guesses are made from tokens the host knows, so while a drafter has any to
make, each step is waited for (`cuda_forward.py`); while it rests, steps are queued.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.model.layout import Span
from moesaic.serve.core.forward_pass import Chunk, Forward, ForwardPass
from moesaic.serve.core.policies.chunked import Chunked
from moesaic.serve.core.request import Output, Request, TokenLogprob
from moesaic.serve.core.runner import Runner
from moesaic.serve.core.sampler import Choices
from moesaic.serve.gpu.decode_batch import Cohort, Seat, Seats
from moesaic.serve.gpu.forward import GraphedForward, part_of, told
from moesaic.serve.gpu.graphed_step import Flight, GraphedSteps, takes
from moesaic.serve.gpu.inputs import Inputs, Part

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


@dataclass
class Entry:
    """The part in a step of a request that was not in the cohort."""

    seat: Seat
    span: Span
    last: bool  # whether the model has then seen all the request knows
    row: int | None  # of the tokens chosen, if one is
    logits: int | None = None  # its row of the logits kept for the host


@dataclass
class UnderWay:
    flight: Flight
    cohort: list[Seat]  # one row each, the first
    entries: list[Entry]
    version: int
    logits_XV: Tensor | None
    routes_LTK: Tensor | None


class QueuedSteps(Runner):
    """What `Engine.step` does where the model is on a GPU and of a kind that runs as graphs."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        most = engine.scheduler.most
        starts = list(engine.experts.starts.values())
        self.steps = GraphedSteps(engine.model, engine.cache, most, engine.experts.counts, starts)
        self.seats = Seats(most)
        self.cohort = Cohort(engine.page_pool)
        self.under_way: deque[UnderWay] = deque()
        self.version = engine.version
        self.weights = self._addresses()
        self.settled: float | None = None  # when a step of the cohort alone was last done with
        # A step makes thousands of small objects, and collections that walk the whole program would stop the device.
        gc.freeze()

    verifies_trees = False

    @staticmethod
    def fits(engine: Engine) -> bool:
        """Interrupting a step between two layers (other policies) and caches that are pruned are for plain passes."""
        return takes(engine.model) and engine.page_pool.store is None and isinstance(engine.scheduler.policy, Chunked)

    def queued_outputs(self) -> list[Output] | None:
        """What came of an earlier step, with one more queued behind it. None where a plain pass must run next."""
        engine, began = self.engine, self.engine.clock()
        scheduler, drafter = engine.scheduler, engine.drafter
        others = scheduler.stopped or any(one.adapter is not None for one in scheduler.requests.values())
        if engine.paused:
            return self._settle_all()
        outputs = self._follow_weights()
        if others or (drafter is not None and not drafter.rests(len(scheduler.requests))):
            return outputs + self._dissolve() or None
        self.cohort.drop_ended()
        chunks = self._others(began) if self.cohort.grow() else None
        if chunks is None:  # not enough pages for all: the scheduler must take some away
            outputs += self._dissolve()
            made = scheduler.schedule(began)
            assert isinstance(made, list)
            chunks = made
        busy = bool(chunks or self.cohort.seats)
        if busy:
            self.under_way.append(self._launch(chunks))
        outputs += self._settle_all(but=1 if busy else 0)
        if busy or outputs:
            engine.counts.busy_seconds += engine.clock() - began
        return outputs

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a forward that is waited for can be a graph: guesses in lines, of requests without adapters."""
        return all(chunk.request.adapter is None and (chunk.draft is None or chunk.draft.is_line) for chunk in chunks)

    def run(self, work: list[Chunk] | ForwardPass) -> Forward | None:
        return self.forward(work) if isinstance(work, list) and work and self.takes(work) else super().run(work)

    def forward(self, chunks: list[Chunk]) -> GraphedForward:
        engine, began = self.engine, self.engine.clock()
        parts = []
        for chunk in chunks:
            seat = self.seats.of(chunk.request)
            if pages := seat.new_pages():
                self.steps.give_pages(pages)
            parts.append(part_of(chunk, seat, followed=chunk.rows - chunk.tokens + 1 if chunk.last else 0))
        inputs = Inputs.of(self.cohort.rows(), parts, engine.scheduler.most, self.steps.tile)
        recorded = inputs.shape in self.steps.graphs
        made = GraphedForward(chunks, engine, self.steps.run(inputs))
        made.usual, made.seconds = recorded, engine.clock() - began
        engine.counts.busy_seconds += made.seconds
        return made

    def _others(self, now: float) -> list[Chunk] | None:
        """Tokens for the requests that are not in the cohort; None, where nobody goes on and there are no pages."""
        scheduler, members = self.engine.scheduler, self.cohort.seats
        if len(scheduler.requests) == len(members):
            return []
        policy = scheduler.policy
        assert isinstance(policy, Chunked)
        ready = scheduler.ready()
        left = policy.tokens - len(members)
        plan = Chunked(left).choose(ready, [], now) if left > 0 else []
        assert isinstance(plan, list)
        chunks = scheduler.find_pages(plan)
        return None if plan and not chunks and not members else chunks

    def _dissolve(self) -> list[Output]:
        """Have everybody where the host knows all of it, and the scheduler decide."""
        outputs = self._settle_all()
        for seat in self.cohort.seats:
            seat.request.end_forward()
        self.cohort.clear()
        self.settled = None
        return outputs

    # Queueing

    def _launch(self, chunks: Sequence[Chunk]) -> UnderWay:
        members = self.cohort.seats
        parts: list[Part] = []
        entries: list[Entry] = []
        row = chosen = len(members)
        for chunk in chunks:
            request, start = chunk.request, chunk.request.computed
            seat = self.seats.of(request)
            seat.changed = True
            part = part_of(chunk, seat, followed=chunk.last and not request.embed)
            parts.append(part)
            span = Span(len(entries), row, row + chunk.tokens, start)
            entries.append(Entry(seat, span, chunk.last, chosen if part.followed else None))
            row += chunk.tokens
            chosen += part.followed
        changed = [entry.seat for entry in entries] + [seat for seat in members if seat.changed]
        if pages := {place: page for seat in changed for place, page in seat.new_pages().items()}:
            self.steps.give_pages(pages)
        inputs = Inputs.of(self.cohort.rows(), parts, self.engine.scheduler.most, self.steps.tile)
        flight = self.steps.run(inputs)
        kept = UnderWay(
            flight, list(members), entries, self.engine.version, *self._keep(flight, entries, chunks, members)
        )
        self.cohort.advance()
        for chunk, entry in zip(chunks, entries, strict=True):
            self._advance(chunk, entry)
        return kept

    def _keep(
        self, flight: Flight, entries: list[Entry], chunks: Sequence[Chunk], members: list[Seat]
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the host wants of a step besides tokens must be copied before the next one overwrites it."""
        if any(chunk.request.embed or chunk.request.sampling.prompt_logprobs is not None for chunk in chunks):
            self.engine.record_prompt(chunks, [entry.span for entry in entries], flight.hidden_TD)
        by_host = [entry for entry in entries if entry.row is not None and not entry.seat.simple]
        for number, entry in enumerate(by_host):
            entry.logits = number
        rows = [entry.row for entry in by_host]
        logits_XV = flight.logits_RV[torch.tensor(rows, device=flight.logits_RV.device)] if rows else None
        seats = [*members, *(entry.seat for entry in entries)]
        recorded = any(seat.request.sampling.record_routes for seat in seats)
        return logits_XV, flight.routes_LTK.clone() if recorded else None

    def _advance(self, chunk: Chunk, entry: Entry) -> None:
        """The request is where it will be when the step has run; only the token it chose is not known yet."""
        request, counts = chunk.request, self.engine.counts
        counts.prompt_tokens += max(0, min(chunk.tokens, len(request.prompt) - request.computed))
        request.computed += chunk.tokens
        if entry.last:  # until its token is there, or as long as it is in the cohort
            request.begin_forward()
        if entry.row is not None and entry.seat.simple and request.computed + 1 < request.limit:
            self.cohort.join(entry.seat, request.computed)
        if chunk.tokens > 1:
            self.engine.page_pool.publish(request)
            entry.seat.changed = True  # a page that somebody else has filled too is theirs from now on

    # What came of it

    def _settle_all(self, but: int = 0) -> list[Output]:
        outputs: list[Output] = []
        while len(self.under_way) > but:
            self._settle(self.under_way.popleft(), outputs)
        return outputs

    def _settle(self, done: UnderWay, outputs: list[Output]) -> None:
        engine, size = self.engine, self.engine.page_pool.size
        chosen_R = list(zip(*done.flight.wait(), strict=True))
        engine.counts.steps += 1
        if engine.drafter is not None:
            now = engine.clock()
            if self.settled is not None and not done.entries:
                engine.drafter.rested(len(done.cohort), now - self.settled)
            self.settled = None if done.entries else now
        for row, (seat, found) in enumerate(zip(done.cohort, chosen_R)):
            request = seat.request
            if self._counts(seat, done):
                if done.routes_LTK is not None:
                    self._note_routes(request, done.routes_LTK[:, row : row + 1])
                request.computed += 1
                outputs.append(self._gain(seat, told(request, *found), done.version))
                if request.computed % size == 0 and request.pages:
                    engine.page_pool.publish(request)
                    seat.changed = True
        choices = Choices(done.logits_XV) if done.logits_XV is not None else None
        for entry in done.entries:
            request = entry.seat.request
            if not self._counts(entry.seat, done):
                continue
            if done.routes_LTK is not None:
                self._note_routes(request, done.routes_LTK[:, entry.span.start : entry.span.stop])
            if entry.last:
                chosen = None
                if entry.logits is not None and choices is not None:
                    chosen = choices.choose(entry.logits, request, engine.stop_tokens)
                elif entry.row is not None:
                    chosen = told(request, *chosen_R[entry.row])
                outputs.append(self._gain(entry.seat, chosen, done.version))

    def _counts(self, seat: Seat, done: UnderWay) -> bool:
        """Whether a request still wants what a step computed for it."""
        request = seat.request
        if request.finish_reason is not None:
            request.end_forward()
            self.engine.retire(request)
            return False
        if not seat.taken:  # its pages were taken meanwhile: it has begun anew
            return False
        if done.version < self.engine.oldest:
            request.end_forward()
            self.engine.restart(request)
            return False
        return True

    def _gain(self, seat: Seat, chosen: TokenLogprob | None, version: int) -> Output:
        request = seat.request
        if chosen is None:  # all it wanted was its prompt read
            request.finish_reason = "stop"
            output = Output(request, [], "", [])
        else:
            output = Output(request, [chosen.token], request.append(chosen.token, self.engine.stop_tokens), [chosen])
        self.engine.record_output(output, version)
        if request.finish_reason is not None:
            request.end_forward()
            self.engine.retire(request)
        elif not seat.member:
            request.end_forward()
        return output

    def _note_routes(self, request: Request, routes_LTK: Tensor) -> None:
        if request.sampling.record_routes:
            for layer, routes_TK in zip(self.engine.experts.starts, routes_LTK, strict=True):
                request.routes.setdefault(layer, []).append(routes_TK.long())

    # Weights

    def _follow_weights(self) -> list[Output]:
        """Weights that were changed in place are read by the next step; moved ones need new graphs. Members of the
        cohort begin anew, if they are to, like everybody else."""
        engine, outputs = self.engine, []
        if self.version != engine.version:
            if self.version < engine.oldest:
                members = list(self.cohort.seats)
                outputs = self._dissolve()
                for seat in members:
                    if seat.taken and seat.request.finish_reason is None:
                        engine.restart(seat.request)
            self.version = engine.version
            before, self.weights = self.weights, self._addresses()
            if before != self.weights:
                self.steps.forget()
        return outputs

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.engine.model.parameters())
