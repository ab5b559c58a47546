"""Speculative decoding with a draft model: a smaller model with the same tokenizer (Leviathan et al., 2023).

    moesaic serve DIR --drafter model path=SMALLER_DIR

It has a paged KV cache of its own. Every request has a shadow there, which holds the request's tokens and then the
draft tokens; before the next draft, the shadow is cut back to where the two agree. Where pages run out, shadows of
requests that are not being drafted for are evicted first, and prefilled again if they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moesaic.errors import UserError
from moesaic.model.directory import load
from moesaic.serve.core.drafters import Draft, Drafter, shadow_of
from moesaic.serve.core.forward_pass import Chunk, ForwardPass
from moesaic.serve.core.memory import pages_that_fit
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request
from moesaic.serve.core.sampler import Sampler

if TYPE_CHECKING:
    from moesaic.model.transformer import Model
    from moesaic.serve.core.engine import Engine

CHUNK = 512  # tokens of a prefill


@dataclass(eq=False)
class DraftModel(Drafter):
    path: str
    length: int = 16  # max draft tokens
    cache_bytes: int | None = None  # by default as many tokens as the engine's own cache holds

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("length must be at least 1")

    @classmethod
    def offered(cls, model: Model, draft_model: str | None) -> Drafter | None:
        return cls(draft_model) if draft_model is not None else None

    def start(self, engine: Engine) -> None:
        main, size = engine.model, engine.page_pool.size
        self.engine = engine
        self.model = load(self.path, dtype=main.dtype, device=main.device, threads=torch.get_num_threads())
        _same_tokens(self.path, self.model, main)
        pages = engine.cache.pages
        if self.cache_bytes is not None:
            pages = pages_that_fit(self.model, self.cache_bytes, size, engine.scheduler.max_requests)
        self.page_pool = PagePool(self.model.new_cache(pages, size))
        self.shadows: dict[int, Request] = {}  # least recently used first
        self.agreed: dict[int, int] = {}  # how many of a shadow's tokens are the request's own

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        limit = min(limit, self.length)
        able: dict[int, Request] = {}
        for request in requests:
            shadow = self._follow(request)
            if len(shadow.tokens) + limit <= self.model.config.context and self._grow(shadow, limit, able):
                able[request.number] = shadow
        confidence: dict[int, list[float]] = {number: [] for number in able}
        for _ in range(limit if able else 0):
            chosen = self._next(list(able.values()))
            for (number, shadow), (token, chance) in zip(able.items(), chosen, strict=True):
                shadow.tokens.append(token)
                confidence[number].append(chance)
        drafts = []
        for request in requests:
            draft_tokens = self.shadows[request.number].tokens[len(request.tokens) :] if request.number in able else []
            known = [token < self.engine.model.config.vocab for token in draft_tokens]
            count = known.index(False) if False in known else len(draft_tokens)  # a vocabulary may be padded further
            drafts.append(Draft.line(draft_tokens[:count], confidence.get(request.number, [])[:count]))
        return drafts

    def finished(self, request: Request) -> None:
        if (shadow := self.shadows.pop(request.number, None)) is not None:
            self.page_pool.release(shadow)
        self.agreed.pop(request.number, None)

    def _follow(self, request: Request) -> Request:
        """The request's shadow, back where it last agreed with it."""
        number = request.number
        shadow = self.shadows.pop(number, None)
        if shadow is None:
            shadow = shadow_of(request)
            shadow.root = request.salt
        self.shadows[number] = shadow
        place, end = self.agreed.get(number, 0), len(request.tokens)
        while place < min(end, len(shadow.tokens)) and shadow.tokens[place] == request.tokens[place]:
            place += 1
        shadow.tokens[place:] = request.tokens[place:]
        shadow.mu = request.mu
        # The last token is always computed again: its hidden state, which predicts the next one, is not kept.
        shadow.computed = min(shadow.computed, place, end - 1)
        self.agreed[number] = end
        self.page_pool.publish(shadow)
        return shadow

    def _grow(self, shadow: Request, draft_tokens: int, able: dict[int, Request]) -> bool:
        if not shadow.pages:
            self.page_pool.match_prefix(shadow)
        while not self.page_pool.grow(shadow, len(shadow.tokens) + draft_tokens):
            idle = (n for n, other in self.shadows.items() if other.pages and other is not shadow and n not in able)
            if (oldest := next(idle, None)) is None:
                self.page_pool.release(shadow)
                return False
            self.page_pool.release(self.shadows[oldest])
        return True

    def _next(self, shadows: list[Request]) -> list[tuple[int, float]]:
        """The next token of each, and how likely it was."""
        while sum(shadow.pending for shadow in shadows) > max(CHUNK, len(shadows)):
            longest = max(shadows, key=lambda shadow: shadow.pending)
            self._compute(
                ForwardPass(self.model, [Chunk(longest, min(CHUNK, longest.pending - 1))], self.page_pool.cache)
            )
        work = ForwardPass(self.model, [Chunk(shadow, shadow.pending) for shadow in shadows], self.page_pool.cache)
        self._compute(work)
        last = torch.tensor([span.stop - 1 for span in work.spans], device=self.model.device)
        sampler = Sampler(self.model.logits_at(work.hidden_TD, last))
        chosen = [sampler.sample(row, shadow, self.engine.stop_tokens) for row, shadow in enumerate(shadows)]
        return [(token.token, math.exp(token.logprob)) for token in chosen]

    def _compute(self, work: ForwardPass) -> None:
        while not work.done:
            work.advance()
        for chunk in work.chunks:
            chunk.request.end_forward(computed=chunk.tokens)


def _same_tokens(path: str, draft: Model, main: Model) -> None:
    ours, theirs = main.tokenizer, draft.tokenizer
    if ours is not None and theirs is not None:
        same = ours.fast.get_vocab() == theirs.fast.get_vocab()
    else:
        same = draft.config.vocab == main.config.vocab
    if not same:
        raise UserError(path, "has another tokenizer than the model it drafts for", "Take one of the same family.")
