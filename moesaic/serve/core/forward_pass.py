"""A forward of some requests' tokens, and how it is run: here layer by layer, as on a CPU, so that it can stop between
any two and go on later; `serve/gpu` has one that runs CUDA graphs and queues steps ahead of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from moesaic.kernels.adapted import AdaptedKernels
from moesaic.kernels.interface import Kernels
from moesaic.model.context import Routing
from moesaic.model.layout import Layout, PagedCache, Span
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import rows_by_adapter
from moesaic.serve.core.device_timing import Progress, timer_for
from moesaic.serve.core.drafters import Draft
from moesaic.serve.core.kv.attention import CompactKernels
from moesaic.serve.core.kv.compact import CompactRequest
from moesaic.serve.core.request import Output, Request, TokenLogprob
from moesaic.serve.core.sampler import Sampler

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


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
        return tree_TT(self.tokens, self.draft.parents)

    @property
    def cached(self) -> int:
        """Tokens before these that they see: of a window, those of the window."""
        windows, computed = self.request.windows, self.request.computed
        around = windows.around(computed) if windows is not None else None
        return computed - (around[0] if around is not None else 0)

    def pages(self, size: int) -> list[int]:
        """Of those tokens and these."""
        windows, computed = self.request.windows, self.request.computed
        around = windows.around(computed) if windows is not None else None
        return self.request.pages[-(-around[0] // size) if around is not None else 0 :]

    @property
    def moved(self) -> bool:
        """Whether positions are others than places."""
        windows = self.request.windows
        return windows is not None and self.request.computed + self.tokens > windows.total

    @property
    def prefix(self) -> int:
        windows = self.request.windows
        return 0 if windows is None or self.request.computed else windows.prefix

    def positions(self) -> list[int]:
        windows, computed = self.request.windows, self.request.computed
        places = list(range(computed, computed + self.tokens))
        if windows is not None:
            places = [windows.position(place) for place in places]
        for parent in self.draft.parents if self.draft else ():
            places.append(places[self.tokens + parent] + 1)
        return places


def tree_TT(tokens: int, parents: Sequence[int]) -> Tensor:
    """Which rows each row sees: `tokens` in a line, then draft tokens behind their parents (-1: the line)."""
    rows = tokens + len(parents)
    sees_TT = torch.ones(rows, rows, dtype=torch.bool).tril()
    for row, parent in enumerate(parents, tokens):
        sees_TT[row] = sees_TT[tokens + parent]
        sees_TT[row, row] = True
    return sees_TT


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
        branching = any(tree_TT is not None for tree_TT in trees)
        if branching or any(chunk.moved for chunk in chunks):
            positions = torch.tensor([place for chunk in chunks for place in chunk.positions()], device=model.device)
        self.compact = compact_requests(chunks)
        layout = Layout(
            [chunk.rows for chunk in chunks],
            cached=[chunk.cached for chunk in chunks],
            cache=None if self.compact else cache,
            pages=[chunk.pages(cache.page_size) for chunk in chunks],
            positions=positions,
            trees=trees if branching else None,
            prefixes=[chunk.prefix for chunk in chunks],
            states=[cast(int, chunk.request.state) for chunk in chunks] if cache.states is not None else None,
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


class Runner:
    """Between any two layers the engine's inbox is read, and the scheduling policy may stop the forward."""

    verifies_trees = True  # whether the draft tokens of a request may be a tree
    takes_windows = True  # whether a token's position may be another than its place

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        if engine.page_pool.store is not None:  # compact requests drop the last rows, and only those
            self.verifies_trees = False
        self.timer = timer_for(engine.model.device, engine.clock)

    def warm_up(self) -> None:
        """Do now what would else be done when it is first needed."""

    def queued_outputs(self) -> list[Output] | None:
        """Outputs of steps that were queued ahead, while more are; None where the next step is to be scheduled."""
        return None

    def run(self, work: list[Chunk] | ForwardPass) -> Forward | None:
        """The finished forward of some chunks, or of a forward that was stopped before. None where there is nothing to
        run, or where it was stopped: the scheduler has it then."""
        engine = self.engine
        if isinstance(work, list):
            if not work:
                return None
            work = ForwardPass(engine.model, work, engine.cache, engine.version)
        if not self._run_layers(work):
            engine.scheduler.stopped.append(work)
            return None
        return work

    def _run_layers(self, forward: ForwardPass) -> bool:
        """Layer by layer; False if something more urgent came between."""
        engine, policy = self.engine, self.engine.scheduler.policy
        progress, due = Progress(self.timer, policy.preempts), float("-inf")
        while not forward.done:
            forward.advance()
            progress.launched()
            now = engine.clock()
            if (engine.inbox or now >= due) and not forward.done:
                engine.read_inbox()
                ready = engine.scheduler.ready()
                if engine.paused or not engine.needs(forward) or policy.interrupts(forward, ready, now):
                    break
                due = policy.next_event(forward, ready, now)
        seconds = progress.seconds()
        forward.seconds += seconds
        engine.counts.busy_seconds += seconds
        if forward.done:
            policy.finished(forward)
        return forward.done
