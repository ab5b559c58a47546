"""Speculative decoding with a draft model: a smaller model with the same tokenizer (Leviathan et al., 2023).

    moesaic serve DIR --drafter model path=SMALLER_DIR

It has a paged KV cache of its own. Every request has a shadow there, which holds the request's tokens and then the
draft tokens; before the next draft, the shadow is cut back to where the two agree. Where pages run out, shadows of
requests that are not being drafted for are evicted first, and prefilled again if they are needed.

In a chain (SpecRouter) it stands on cheaper drafters: it verifies their drafts in one forward of its own and hands on
what it would have drafted token by token. A router of its own says whose drafts, how many, and whether any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from moesaic.errors import UserError
from moesaic.model.directory import load
from moesaic.serve.core.drafters import Draft, Drafter, Shadow, certain_tokens, shadow_of
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.forward_pass import Chunk, ForwardPass, TokenSampler
from moesaic.serve.core.memory import pages_that_fit
from moesaic.serve.core.output_search import OutputSearch, SearchOptions
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request
from moesaic.serve.core.sampler import Sampler
from moesaic.serve.core.sequence_states import refuse_request

if TYPE_CHECKING:
    from moesaic.model.transformer import Model
    from moesaic.serve.core.engine import Engine

CHUNK = 512  # tokens of a prefill


@dataclass(eq=False)
class DraftModel(Drafter):
    path: str
    length: int = 16  # max draft tokens
    cache_bytes: int | None = None  # by default as many tokens as the engine's own cache holds
    output: Literal["exact", "graph", "scan"] = "exact"  # whole matmuls for greedy drafts, or a search (FGD)
    drafts_for_shadows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("length must be at least 1")

    @classmethod
    def offered(cls, model: Model, draft_models: Sequence[str]) -> Sequence[Drafter]:
        return [cls(path) for path in draft_models]

    @property
    def label(self) -> str:
        return f"model {Path(self.path).name}"

    def start(self, engine: Engine) -> None:
        main, size = engine.model, engine.page_pool.size
        self.engine = engine
        self.model = load(self.path, dtype=main.dtype, device=main.device, threads=torch.get_num_threads())
        _same_tokens(self.path, self.model, main)
        refuse_request(self.model.config, self.path, "rejected draft tokens cannot be taken out of it")
        pages = engine.cache.pages
        if self.cache_bytes is not None:
            pages = pages_that_fit(self.model, self.cache_bytes, size, engine.scheduler.max_requests)
        self.page_pool = PagePool(self.model.new_cache(pages, size))
        self.shadows: dict[int, Shadow] = {}  # least recently used first
        self.agreed: dict[int, int] = {}  # how many of a shadow's tokens are the request's own
        self.below: DraftRouter | None = None
        self.search = None
        if self.output != "exact":  # whatever it misses, the model will see
            self.search = OutputSearch(self.model, SearchOptions(self.output, check=0), "drafter model: output")

    def stand_on(self, lower: Sequence[Drafter], always: bool = False) -> None:
        if lower:
            self.below = DraftRouter.over(*lower, always=always)
            self.below.begin(self.engine.clock, only_lines=True)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        limit = min(limit, self.length)
        able: dict[int, Shadow] = {}
        for request in requests:
            shadow = self._follow(request)
            if len(shadow.tokens) + limit <= self.model.config.context and self._grow(shadow, limit, able):
                able[request.number] = shadow
        confidence: dict[int, list[float]] = {number: [] for number in able}
        while short := [shadow for number, shadow in able.items() if len(confidence[number]) < limit]:
            rooms = [limit - len(confidence[shadow.number]) for shadow in short]
            for shadow, chances in zip(short, self._lengthen(short, rooms), strict=True):
                confidence[shadow.number] += chances
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
        if self.below is not None:
            self.below.forget(request)

    def _follow(self, request: Request) -> Shadow:
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
        self.agreed[number] = shadow.certain = certain_tokens(request)
        self.page_pool.publish(shadow)
        return shadow

    def _grow(self, shadow: Shadow, draft_tokens: int, able: dict[int, Shadow]) -> bool:
        if not shadow.pages:
            self.page_pool.match_prefix(shadow)
        while not self.page_pool.grow(shadow, len(shadow.tokens) + draft_tokens):
            idle = (n for n, other in self.shadows.items() if other.pages and other is not shadow and n not in able)
            if (oldest := next(idle, None)) is None:
                self.page_pool.release(shadow)
                return False
            self.page_pool.release(self.shadows[oldest])
        return True

    def _lengthen(self, shadows: list[Shadow], rooms: list[int]) -> list[list[float]]:
        """One forward: every shadow gains its next token, and before it what lower drafters drafted rightly, within its
        room. How likely each of these tokens was."""
        while sum(shadow.pending for shadow in shadows) > max(CHUNK, len(shadows)):
            longest = max(shadows, key=lambda shadow: shadow.pending)
            self._compute(
                ForwardPass(self.model, [Chunk(longest, min(CHUNK, longest.pending - 1))], self.page_pool.cache)
            )
        chunks = [Chunk(shadow, shadow.pending) for shadow in shadows]
        if self.below is not None and max(rooms) > 1:
            drafts = self.below.draft(shadows, max(rooms) - 1)
            for chunk, draft, room in zip(chunks, drafts, rooms, strict=True):
                chunk.draft = draft.cut(room - 1) if len(draft) and room > 1 else None
        work = ForwardPass(self.model, chunks, self.page_pool.cache)
        rows = [
            row for chunk, span in zip(chunks, work.spans) for row in range(span.start + chunk.tokens - 1, span.stop)
        ]
        self._compute(work)
        hidden_RD = work.hidden_TD[torch.tensor(rows, device=self.model.device)]
        sampler = self.search.sampler(hidden_RD) if self.search else Sampler(self.model.logits_at(hidden_RD))
        gained, first = [], 0
        for chunk in chunks:
            gained.append(self._verify(chunk, sampler, first))
            first += chunk.rows - chunk.tokens + 1
        if self.below is not None:
            self.below.learn(work)
        return gained

    def _verify(self, chunk: Chunk, sampler: TokenSampler, first: int) -> list[float]:
        """Its own next tokens, as far as the lower draft foresaw them and one further: they are appended."""
        chances: list[float] = []
        node: int | None = -1
        while node is not None:
            chosen = sampler.sample(first + 1 + node, chunk.request, self.engine.stop_tokens)
            chunk.request.tokens.append(chosen.token)
            chances.append(math.exp(chosen.logprob))
            node = chunk.draft.child(node, chosen.token) if chunk.draft is not None else None
            if node is not None:
                chunk.accepted.append(node)
        chunk.request.computed += len(chunk.accepted)  # a line: their rows are where they belong
        return chances

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
