"""The engine's step on a GPU: queue the next step before the last one's tokens are known, so the device never waits.

A request whose next token is chosen on the device may be given its next step at once: only that token is unknown, and
it is already where the next step reads it. What the host learns one step late is that a request has ended; the step it
was still part of is then thrown away. All steps run in one stream, in the order in which they were queued, so pages and
slots can change hands without waiting.

Requests whose wishes are not those of the device (a grammar, penalties, top-p) get their logits, are chosen for on the
host, and take part in every second step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.model.layout import Span
from moesaic.serve.cuda_inputs import Inputs, Part
from moesaic.serve.cuda_step import Flight, GraphedSteps, takes
from moesaic.serve.passes import Share
from moesaic.serve.policies.chunked import Chunked
from moesaic.serve.request import Output, Request, Sampling, TokenLogprob
from moesaic.serve.sampler import Choices, draw

if TYPE_CHECKING:
    from moesaic.serve.engine import Engine


@dataclass
class Seat:
    """A request's slot on the device, as long as it keeps the pages it sat down with."""

    slot: int
    request: Request
    pages: list[int]
    simple: bool  # whether the device chooses its tokens
    fixed: int = 0  # pages that are shared, and will not change any more
    sent: tuple[int, ...] = ()  # the pages after those, as the device knows them

    @property
    def taken(self) -> bool:
        return self.request.pages is self.pages


@dataclass
class Entry:
    """One request's part of a step under way."""

    seat: Seat
    span: Span
    last: bool  # whether the model has then seen all the request knows
    row: int | None  # of the tokens chosen, if one is
    counted: bool = False  # whether the request went on without knowing the token
    logits: int | None = None  # its row of the logits kept for the host


@dataclass
class UnderWay:
    flight: Flight
    entries: list[Entry]
    version: int
    logits_XV: Tensor | None
    routes_LTK: Tensor | None


def chosen_on_device(sampling: Sampling) -> bool:
    """Whether a request wants the likeliest token, or one drawn from the whole distribution, and nothing else."""
    whole = not sampling.top_k and sampling.top_p >= 1.0 and sampling.min_p <= 0.0
    return whole and not sampling.logprobs and replace(sampling, temperature=0.0).plain


class QueuedSteps:
    """What `Engine.step` does where the model is on a GPU and of a kind that runs as graphs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        starts = list(engine.experts.starts.values())
        most = engine.scheduler.most
        self.steps = GraphedSteps(engine.model, engine.cache, most, engine.experts.counts, starts)
        self.seats: dict[int, Seat] = {}
        self.free = list(range(most - 1, -1, -1))
        self.under_way: deque[UnderWay] = deque()
        self.version = engine.version
        self.weights = self._addresses()

    @staticmethod
    def fits(engine: Engine) -> bool:
        """Interrupting a step between two layers (other policies) and guessing ahead are for plain passes."""
        return takes(engine.model) and engine.drafter is None and isinstance(engine.scheduler.policy, Chunked)

    def step(self) -> list[Output] | None:
        """What came of an earlier step, with one more queued behind it. None where a plain pass must run next."""
        engine, began = self.engine, self.engine.clock()
        scheduler = engine.scheduler
        others = scheduler.stopped or any(one.adapter is not None for one in scheduler.requests.values())
        if engine.paused or others:
            outputs = self._settle_all()
            return outputs if outputs or not others else None
        self._follow_weights()
        shares = scheduler.schedule(began)
        assert isinstance(shares, list)
        if shares:
            self.under_way.append(self._launch(shares))
        outputs = self._settle_all(but=1 if shares else 0)
        if shares or outputs:
            engine.counts.busy_seconds += engine.clock() - began
        return outputs

    # Queueing

    def _launch(self, shares: Sequence[Share]) -> UnderWay:
        engine = self.engine
        parts: list[Part] = []
        entries: list[Entry] = []
        pages: dict[tuple[int, int], int] = {}
        row = chosen = 0
        for share in shares:
            request, start, last = share.request, share.request.computed, share.last
            seat = self._seat(request)
            pages.update(self._new_pages(seat))
            tokens = request.tokens[start : start + share.tokens]
            part = Part(seat.slot, start, tokens, share.tokens, last and not request.embed)
            if part.followed and seat.simple and request.sampling.temperature > 0:
                part.temperature = request.sampling.temperature
                part.draw = draw(request.seed, start + share.tokens)
            parts.append(part)
            span = Span(len(entries), row, row + share.tokens, start)
            entries.append(Entry(seat, span, last, chosen if part.followed else None))
            row += share.tokens
            chosen += part.followed
        if pages:
            self.steps.give_pages(pages)
        flight = self.steps.run(Inputs.of(parts, engine.scheduler.most, self.steps.tile))
        kept = UnderWay(flight, entries, engine.version, *self._keep(flight, entries, shares))
        for share, entry in zip(shares, entries, strict=True):
            self._advance(share, entry)
        return kept

    def _keep(self, flight: Flight, entries: list[Entry], shares: Sequence[Share]) -> tuple[Tensor | None, ...]:
        """What the host wants of a step besides tokens must be copied before the next one overwrites it."""
        device = flight.logits_RV.device
        if any(share.request.embed or share.request.sampling.prompt_logprobs is not None for share in shares):
            self.engine._note_prompts(shares, [entry.span for entry in entries], flight.hidden_TD)
        by_host = [entry for entry in entries if entry.row is not None and not entry.seat.simple]
        for number, entry in enumerate(by_host):
            entry.logits = number
        rows = [entry.row for entry in by_host]
        logits_XV = flight.logits_RV[torch.tensor(rows, device=device)] if rows else None
        recorded = any(entry.seat.request.sampling.record_routes for entry in entries)
        return logits_XV, flight.routes_LTK.clone() if recorded else None

    def _advance(self, share: Share, entry: Entry) -> None:
        """The request is where it will be when the step has run; only the token it chose is not known yet."""
        request, counts = share.request, self.engine.counts
        counts.prompt_tokens += max(0, min(share.tokens, len(request.prompt) - request.computed))
        request.computed += share.tokens
        if entry.row is not None and entry.seat.simple and request.computed + 1 < request.limit:
            request.ahead += 1
            entry.counted = True
        elif entry.last:
            request.busy = True  # until the token is there
        if share.tokens > 1:
            self.engine.blocks.publish(request)

    def _seat(self, request: Request) -> Seat:
        seat = self.seats.get(request.number)
        if seat is not None and seat.taken:
            return seat
        if seat is None and not self.free:
            for number in [number for number, old in self.seats.items() if not old.taken]:
                self.free.append(self.seats.pop(number).slot)
        slot = seat.slot if seat is not None else self.free.pop()
        seat = Seat(slot, request, request.pages, chosen_on_device(request.sampling) and request.matcher is None)
        self.seats[request.number] = seat
        return seat

    def _new_pages(self, seat: Seat) -> dict[tuple[int, int], int]:
        """What the device does not know yet of a request's pages. A page may change until it is shared."""
        current = tuple(seat.pages[seat.fixed :])
        if current == seat.sent:
            return {}
        known = {number: page for number, page in enumerate(seat.sent)}
        new = {
            (seat.slot, seat.fixed + number): page for number, page in enumerate(current) if known.get(number) != page
        }
        shared = len(seat.request.nodes)
        seat.sent = current[shared - seat.fixed :]
        seat.fixed = shared
        return new

    # What came of it

    def _settle_all(self, but: int = 0) -> list[Output]:
        outputs: list[Output] = []
        while len(self.under_way) > but:
            outputs += self._settle(self.under_way.popleft())
        return outputs

    def _settle(self, done: UnderWay) -> list[Output]:
        engine = self.engine
        tokens, logprobs = done.flight.wait()
        choices = Choices(done.logits_XV) if done.logits_XV is not None else None
        engine.counts.steps += 1
        outputs = []
        for entry in done.entries:
            request = entry.seat.request
            if entry.last and not entry.counted:
                request.busy = False
            if request.finish_reason is not None:
                engine._retire(request)
                continue
            if not entry.seat.taken:  # its pages were taken meanwhile: it begins anew
                continue
            if done.version < engine.oldest:
                engine._start_over(request)
                continue
            self._note_routes(entry, done)
            if entry.last:
                chosen = None
                if entry.logits is not None and choices is not None:
                    chosen = choices.choose(entry.logits, request, engine.stop_tokens)
                elif entry.row is not None:
                    chosen = TokenLogprob(tokens[entry.row], logprobs[entry.row])
                output = self._gain(request, entry, chosen, done.version)
                outputs.append(output)
                if output.finish_reason is not None:
                    engine._retire(request)
                    continue
            if request.computed // engine.blocks.size > len(request.nodes):
                engine.blocks.publish(request)
        return outputs

    def _gain(self, request: Request, entry: Entry, chosen: TokenLogprob | None, version: int) -> Output:
        request.ahead -= entry.counted
        output = Output(request, [], "", [])
        if chosen is None:  # all it wanted was its prompt read
            request.finish_reason = "stop"
        else:
            output.tokens.append(chosen.token)
            output.logprobs.append(chosen)
            output.text = self.engine._append(request, chosen.token)
        return self.engine._said(output, version)

    def _note_routes(self, entry: Entry, done: UnderWay) -> None:
        request = entry.seat.request
        if done.routes_LTK is not None and request.sampling.record_routes:
            for layer, routes_TK in zip(self.engine.experts.starts, done.routes_LTK, strict=True):
                request.routes.setdefault(layer, []).append(routes_TK[entry.span.start : entry.span.stop].long())

    # Weights

    def _follow_weights(self) -> None:
        """Weights that were changed in place are read by the next step; moved ones need new graphs."""
        if self.version != self.engine.version:
            self.version = self.engine.version
            before, self.weights = self.weights, self._addresses()
            if before != self.weights:
                self.steps.forget()

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.engine.model.parameters())
