"""A forward of some requests' tokens; one of plain blocks can stop between any two layers and go on later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels
from moesaic.model.context import Routing
from moesaic.model.layout import Layout, PagedCache, Span
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import AdaptedKernels, rows_by_adapter
from moesaic.serve.core.drafters import Draft
from moesaic.serve.core.kv.attention import CompactKernels
from moesaic.serve.core.kv.compact import CompactRequest
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampler import Sampler


@dataclass
class Chunk:
    """So many of a request's pending tokens, with draft tokens behind them if they reach its last known token."""

    request: Request
    tokens: int
    draft: Draft | None = None
    accepted: list[int] = field(default_factory=list)  # the draft tokens that were accepted, once the pass is over

    @property
    def rows(self) -> int:
        return self.tokens + (len(self.draft) if self.draft else 0)

    @property
    def last(self) -> bool:
        """Whether the model will have seen all the request knows, so that the next token can be chosen."""
        return self.tokens == self.request.pending

    def new_tokens(self) -> list[int]:
        request = self.request
        known = request.tokens[request.computed : request.computed + self.tokens]
        return known + (self.draft.tokens if self.draft else [])

    def tree_TT(self) -> Tensor | None:
        """Which of the new rows each new row sees, where the draft tokens are not a line."""
        if self.draft is None or self.draft.is_line:
            return None
        sees_TT = torch.ones(self.rows, self.rows, dtype=torch.bool).tril()
        for number, parent in enumerate(self.draft.parents):
            row = self.tokens + number
            sees_TT[row] = sees_TT[self.tokens + parent]
            sees_TT[row, row] = True
        return sees_TT

    def positions(self) -> list[int]:
        start = self.request.computed
        places = list(range(start, start + self.tokens))
        for parent in self.draft.parents if self.draft else ():
            places.append(places[self.tokens + parent] + 1)
        return places


def compact_requests(chunks: list[Chunk]) -> list[CompactRequest]:
    """With rows for their new tokens; of one engine all requests are compact, or none."""
    found = [chunk.request.compact for chunk in chunks if chunk.request.compact is not None]
    for compact, chunk in zip(found, chunks, strict=bool(found)):
        compact.begin(chunk.rows, chunk.request.pages)
    return found


class Forward:
    """`advance` runs a part of it; when it is `done`, hidden states and choices are there."""

    spans: Sequence[Span]  # the rows of each share
    hidden_TD: Tensor  # once it is done

    def __init__(self, chunks: list[Chunk], version: int) -> None:
        self.version = version  # of the weights it began with
        self.chunks = chunks
        self.routing = Routing()
        self.seconds = 0.0  # spent in it so far
        self.done = False
        self.usual = True  # whether it took as long as the next of its kind will
        for chunk in chunks:
            chunk.request.begin_forward()

    @property
    def tokens(self) -> int:
        return sum(span.new for span in self.spans)

    def advance(self) -> None:
        raise NotImplementedError

    def sampler(self, rows: list[int]) -> TokenSampler:
        """What follows each of these rows: those from the last known token on of the shares that are `last`."""
        raise NotImplementedError

    @property
    def routes(self) -> dict[int, Tensor]:
        """Of each layer with experts, those of all rows."""
        return self.routing.choices

    def note_routes(self) -> None:
        """For the requests that want to know: the experts of every token that was kept."""
        for chunk, span in zip(self.chunks, self.spans):
            if chunk.request.sampling.record_routes:
                rows = list(range(chunk.tokens)) + [chunk.tokens + node for node in chunk.accepted]
                for layer, routes_TK in self.routes.items():
                    kept = routes_TK[span.start : span.stop][rows]
                    chunk.request.routes.setdefault(layer, []).append(kept)


class TokenSampler(Protocol):
    def sample(self, row: int, request: Request, stop_tokens: set[int]) -> TokenLogprob: ...


class ForwardPass(Forward):
    """Layer by layer."""

    def __init__(self, model: Model, chunks: list[Chunk], cache: PagedCache, version: int = 0) -> None:
        super().__init__(chunks, version)
        self.model = model
        trees = [chunk.tree_TT() for chunk in chunks]
        positions = None
        if any(tree_TT is not None for tree_TT in trees):
            positions = torch.tensor([place for chunk in chunks for place in chunk.positions()], device=model.device)
        self.compact = compact_requests(chunks)
        layout = Layout(
            [chunk.rows for chunk in chunks],
            cached=[chunk.request.computed for chunk in chunks],
            cache=None if self.compact else cache,
            pages=[list(chunk.request.pages) for chunk in chunks],
            positions=positions,
            trees=trees if positions is not None else None,
            cached_elsewhere=bool(self.compact),
            device=model.device,
        )
        self.layout = layout
        self.spans = layout.spans
        tokens_T = torch.tensor([token for chunk in chunks for token in chunk.new_tokens()], device=model.device)
        self.x_TD, self.context = model.begin(tokens_T, layout, self.routing, self._ops())
        self.layer = 0

    def _ops(self) -> Kernels:
        ops = self.model.ops
        if self.compact:
            ops = cast(Kernels, CompactKernels(ops, self.compact))
        if all(chunk.request.adapter is None for chunk in self.chunks):
            return ops
        own = [(chunk.request.adapter, range(s.start, s.stop)) for chunk, s in zip(self.chunks, self.layout.spans)]
        return cast(Kernels, AdaptedKernels(ops, rows_by_adapter(own, self.model.device)))

    def advance(self) -> None:
        """One layer; or all, where a step is so short that they are run as one kernel."""
        self.x_TD, self.layer = self.model.advance(self.x_TD, self.context, self.layer)
        if self.layer == len(self.model.layers):
            self.hidden_TD, self.done = self.model.finish(self.x_TD, self.context), True

    def sampler(self, rows: list[int]) -> Sampler:
        return Sampler(self.model.logits_at(self.hidden_TD, torch.tensor(rows, device=self.model.device)))
