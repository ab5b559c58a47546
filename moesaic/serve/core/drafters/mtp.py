"""Multi-token prediction (DeepSeek-V3, GLM-4.5) as a drafter: the model's own MTP layers draft the next tokens.

    moesaic serve DIR --drafter mtp length=3

An MTP layer reads the hidden state of a token and the token after it, and keeps keys and values of its own in the
engine's pages, written right after the forward that computed the hidden states. So wherever a page goes (shared,
copied, evicted, computed again), the rows of these layers go with it. The one thing a shared page cannot know is which
token follows its last one: that row is the first request's. It changes draft tokens, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.layout import Layout
from moesaic.serve.core.drafters import Draft, Drafter, shadow_of
from moesaic.serve.core.request import Request
from moesaic.serve.core.sampler import Sampler

if TYPE_CHECKING:
    from moesaic.model.transformer import Model
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward


@dataclass
class _Tail:
    """Where a request's rows end. Layer n reads the token n + 1 places on, so it is n rows behind the first."""

    computed: int
    hidden_1D: Tensor  # the first layer's last hidden state, which predicts the token after the last known one
    waiting: list[Tensor]  # for each layer, hidden states of the one before that it could not read yet


@dataclass
class _Rows:
    """Rows of one layer for one request, from place `start` on."""

    request: Request
    start: int
    hidden_RD: Tensor
    tokens: Sequence[int]  # that followed them, the layer's number of places on


@dataclass(eq=False)
class PredictionLayers(Drafter):
    length: int = 8  # max draft tokens; the last layer feeds itself for those beyond the number of layers
    needs_every_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("length must be at least 1")

    @classmethod
    def offered(cls, model: Model, draft_models: Sequence[str]) -> Sequence[Drafter]:
        return [cls()] if len(model.mtp) else []

    def start(self, engine: Engine) -> None:
        if not len(engine.model.mtp):
            raise UserError(
                "drafter mtp", "the model has no prediction layers", "Take another drafter, such as suffix."
            )
        self.engine, self.model, self.layers = engine, engine.model, len(engine.model.mtp)
        self.tails: dict[int, _Tail] = {}

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        """Run what was just computed through the layers, as far as the tokens that follow are known."""
        requests = [chunk.request for chunk in done.chunks]
        tails, fresh = [], []
        for chunk, span in zip(done.chunks, done.spans):
            rows = [*range(chunk.tokens), *(chunk.tokens + node for node in chunk.accepted)]
            start = chunk.request.computed - len(rows)
            fresh.append((start, hidden_TD[span.start : span.stop][rows]))
            tail = self.tails.pop(chunk.request.number, None)
            # After prefix pages were reused or a request began anew, what waited belongs elsewhere.
            tails.append(tail if tail is not None and tail.computed == start else None)
        waiting: list[list[Tensor]] = [[] for _ in requests]
        ends: list[Tensor] = []  # the last hidden states of the first layer
        for layer in range(self.layers):
            work = []
            for number, (request, tail, (start, hidden_RD)) in enumerate(zip(requests, tails, fresh)):
                if tail is not None:
                    start -= len(tail.waiting[layer])
                    hidden_RD = torch.cat([tail.waiting[layer], hidden_RD])
                follow = request.tokens[start + layer + 1 : start + layer + 1 + len(hidden_RD)]
                work.append(_Rows(request, start, hidden_RD[: len(follow)], follow))
                waiting[number].append(hidden_RD[len(follow) :])
            fresh = list(zip((rows.start for rows in work), self._run(layer, work)))
            ends = ends or [out_RD[-1:] for _, out_RD in fresh]
        for request, end_1D, rest in zip(requests, ends, waiting):
            if request.pending == 1 and len(end_1D):
                self.tails[request.number] = _Tail(request.computed, end_1D, rest)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        """One forward of one layer for each draft token, for all requests together."""
        limit = min(limit, self.length)
        able = [request for request in requests if self._grow(request, limit)]
        copies = {request.number: shadow_of(request) for request in able}
        confidence: dict[int, list[float]] = {request.number: [] for request in able}
        ends = [self.tails[request.number].hidden_1D for request in able]
        # What the next layer reads: the rows that have waited for its token to be drafted, then those just made.
        made = [(request.computed - 1, end_1D) for request, end_1D in zip(able, ends)]
        for count in range(1, limit + 1):
            if not able:
                break
            sampler = Sampler(self.model.logits_at(torch.cat(ends)))
            for row, request in enumerate(able):
                chosen = sampler.sample(row, copies[request.number], self.engine.stop_tokens)
                copies[request.number].tokens.append(chosen.token)
                confidence[request.number].append(math.exp(chosen.logprob))
            if count == limit:
                break
            layer, work = min(count, self.layers - 1), []
            for request, (start, hidden_RD) in zip(able, made):
                if count < self.layers:
                    waited = self.tails[request.number].waiting[layer]
                    hidden_RD = torch.cat([waited, hidden_RD]) if layer > 1 else waited
                    start = request.computed - len(hidden_RD)
                else:
                    start, hidden_RD = start + 1, hidden_RD[-1:]
                follow = copies[request.number].tokens[start + layer + 1 : start + layer + 1 + len(hidden_RD)]
                work.append(_Rows(request, start, hidden_RD, follow))
            outs = self._run(layer, work)
            ends = [out_RD[-1:] for out_RD in outs]
            made = [(rows.start + len(rows.tokens) - 1, out_RD) for rows, out_RD in zip(work, outs)]
        return [
            Draft.line(copies[request.number].tokens[len(request.tokens) :], confidence[request.number])
            if request.number in copies
            else Draft()
            for request in requests
        ]

    def finished(self, request: Request) -> None:
        self.tails.pop(request.number, None)

    def _grow(self, request: Request, draft_tokens: int) -> bool:
        """Whether the last rows are there, and draft tokens have pages for theirs."""
        tail = self.tails.get(request.number)
        known = tail is not None and tail.computed == request.computed
        return known and self.engine.page_pool.grow(request, request.computed + draft_tokens)

    def _run(self, layer: int, work: Sequence[_Rows]) -> list[Tensor]:
        """The hidden states one layer makes of these rows, which stay in the cache."""
        hidden_RD = torch.cat([rows.hidden_RD for rows in work])
        if not len(hidden_RD):
            return [rows.hidden_RD for rows in work]
        places = [rows.start + layer + 1 + place for rows in work for place in range(len(rows.tokens))]
        layout = Layout(
            [len(rows.tokens) for rows in work],
            cached=[rows.start for rows in work],
            cache=self.engine.cache,
            pages=[list(rows.request.pages) for rows in work],
            positions=torch.tensor(places, device=self.model.device),
            device=self.model.device,
        )
        follow_T = torch.tensor([token for rows in work for token in rows.tokens], device=self.model.device)
        out_TD = self.model.predict_further(layer, hidden_RD, follow_T, layout)
        return [out_TD[span.start : span.stop] for span in layout.spans]
