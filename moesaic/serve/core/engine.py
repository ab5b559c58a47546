"""The one engine: every generated token, for the API, the chat, evaluation and rollouts, comes from `Engine.step`.

    engine = moesaic.Engine(moesaic.load("out/smollm2"))
    engine.generate(["The capital of France is"], max_tokens=8, temperature=0.0)[0].text

An engine belongs to one thread. Others may call `submit` and `call`, which only put something into its inbox; that is
read between steps, and between the layers of a long one.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.encoder import refuse_encoder
from moesaic.model.layout import PagedCache, Span
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter, load_adapter
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.forward_pass import Chunk, Forward, ForwardPass, Runner, TokenSampler
from moesaic.serve.core.kept_states import page_pool_for
from moesaic.serve.core.kv.store import Store, store_for
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.memory import dtype_of_cache, pages_that_fit, states_that_fit
from moesaic.serve.core.output_search import OutputSearch, SearchOptions
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.pooling import add_rows
from moesaic.serve.core.prompt_logprobs import record_logprobs
from moesaic.serve.core.request import Completion, Output, Request, Sampling, completion, new_request
from moesaic.serve.core.runner_choice import runner_for
from moesaic.serve.core.scheduler import Scheduler
from moesaic.serve.core.scheduling_policies import SchedulingPolicy
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.sequence_states import check_engine
from moesaic.serve.core.stats import ExpertCounts
from moesaic.serve.energy.governor import FrequencyOptions, governor_for
from moesaic.serve.pages.outside import TierOptions, outside_pages

PAGE_SIZE = 16  # tokens
GPU_TOKENS = 8192  # of a step on a GPU, which is no faster with fewer
PAUSED = 0.002  # seconds between two looks whether to resume


@dataclass
class Counts:
    """What the engine has done since its start."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    aborted: int = 0  # of those that finished
    busy_seconds: float = 0.0


class Engine:
    """`cache_bytes` is a hard limit of the KV cache, `cache_dtype` (float32, bfloat16, float8) by default the model's.
    `tiers` keep pages that were evicted; `weights` names the model's (`serve/pages/identity.py`)."""

    generates: ClassVar[bool] = True  # an encoder's has no next token

    def __init__(
        self,
        model: Model,
        *,
        cache_bytes: int | None = None,
        page_size: int = PAGE_SIZE,
        max_requests: int = 64,
        policy: SchedulingPolicy | None = None,
        drafter: Drafter | None = None,
        kv_policy: KVPolicy | None = None,
        cache_dtype: str | None = None,
        reuse_prefixes: bool = True,
        tiers: TierOptions | None = None,
        weights: str | None = None,
        frequency: FrequencyOptions | None = None,
        output_search: SearchOptions | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if self.generates:
            refuse_encoder(model.config, "model", "no engine can generate with it")
        self.model = model
        self.tokenizer = model.tokenizer
        self.stop_tokens: set[int] = set(model.tokenizer.stop_tokens) if model.tokenizer else set()
        check_engine(model.config, drafter, kv_policy, tiers)
        dtype = dtype_of_cache(model, cache_dtype)
        max_requests, states = states_that_fit(model, cache_bytes, max_requests, reuse_prefixes)
        pages = pages_that_fit(model, cache_bytes, page_size, max_requests, dtype, states)
        self.cache = self.new_cache(pages, page_size, dtype, states)
        self.page_pool = self.new_page_pool(reuse_prefixes, store_for(model, self.cache, kv_policy, drafter))
        policy = policy or (Chunked(tokens=GPU_TOKENS) if model.device.type == "cuda" else Chunked())
        self.scheduler = Scheduler(self.page_pool, policy, max_requests)
        # Behind a router, which drafts only where it pays.
        self.drafter = (
            DraftRouter.over(drafter) if drafter is not None and not isinstance(drafter, DraftRouter) else drafter
        )
        self.clock = clock
        self.outside = outside_pages(self, tiers, weights)
        self.random = random.Random(seed)
        self.adapters: dict[str, Adapter] = {}
        self.inbox: deque[Callable[[], Any]] = deque()
        self.wake: Callable[[], Any] = lambda: None  # whoever steps this engine, and sleeps while it has nothing to do
        self.version = 0  # of the weights
        self.oldest = 0  # forwards begun with weights older than this are not worth finishing
        self.paused = False
        self.counts = Counts()
        self.experts = ExpertCounts(model)
        self.search = OutputSearch(model, output_search, "--output-search") if output_search is not None else None
        self.runner = self.new_runner()
        if self.drafter is not None:
            self.drafter.start(self)
        self.governor = governor_for(self, frequency)

    # What an engine over many ranks has others of
    def new_cache(self, pages: int, page_size: int, dtype: torch.dtype, sequences: int) -> PagedCache:
        return self.model.new_cache(pages, page_size, dtype, sequences)

    def new_page_pool(self, reuse_prefixes: bool, store: Store | None) -> PagePool:
        return page_pool_for(self.cache, reuse_prefixes, store)

    def new_runner(self) -> Runner:
        return runner_for(self)

    # Requests

    def generate(
        self, prompts: Sequence[str | Sequence[int]], n: int = 1, *, adapter: str | None = None, **sampling: Any
    ) -> list[Completion]:
        """Completions of all prompts, in their order; with `n`, so many of each, one after the other."""
        params = Sampling(**sampling)
        requests = [self.request(prompt, params, adapter=adapter, sibling=i) for prompt in prompts for i in range(n)]
        return self.complete(requests)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit requests and run until all of them have finished."""
        texts: list[list[str]] = [[] for _ in requests]
        driver: EngineDriver[list[str]] = EngineDriver(self)
        for request, text in zip(requests, texts):
            driver.add(request, text)
        try:
            while any(request.finish_reason is None for request in requests):
                step = driver.step()
                if step.error is not None:
                    raise step.error
                for text, output in step.outputs:
                    text.append(output.text)
                if step.idle:  # paused, or waiting for pages: another thread will go on
                    time.sleep(PAUSED)
        finally:  # also on Ctrl-C
            driver.abort_all()
        return [completion(request, "".join(text)) for request, text in zip(requests, texts)]

    def request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        sibling: int = 0,
        **options: Any,
    ) -> Request:
        """A request, checked against what this engine can do, not yet submitted."""
        return new_request(self, prompt, sampling or Sampling(), adapter, sibling, **options)

    @property
    def max_length(self) -> int:
        """How many tokens a prompt and its completion may have together."""
        return min(self.model.config.context, self.cache.pages * self.page_pool.size)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Make a LoRA adapter known by a name; running requests with an older one of that name keep it."""
        self.adapters[name] = load_adapter(self.model, path, name)

    def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UserError("adapter", f"there is no {name!r}")

    def submit(self, request: Request) -> None:
        """From any thread."""
        self.inbox.append(lambda: self.add(request))

    def call(self, function: Callable[[], Any]) -> None:
        """From any thread: run something between two steps (abort a request, change weights)."""
        self.inbox.append(function)
        self.wake()

    def add(self, request: Request) -> None:
        request.root = request.shares_with(self.version)
        self.page_pool.place(request)
        request.expected_cached = self.page_pool.cached_prefix(request)
        if self.outside is not None and request.windows is None:
            self.outside.begin(request)
        self.scheduler.requests[request.number] = request

    def abort(self, request: Request) -> None:
        """What it has generated so far stands."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
        self.retire(request)

    def pause(self) -> None:
        """Finish no further step until `resume`; requests keep their pages."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def weights_changed(self, recompute: bool = True) -> None:
        """Nothing cached may be shared any more. Running requests compute their tokens again, or keep what is there."""
        self.version += 1
        self.oldest = self.version if recompute else self.oldest
        self.page_pool.flush()
        self.search = self.search and self.search.indexed_again()
        for request in self.scheduler.requests.values():
            request.root = None
            if recompute and not request.in_forward:
                self.restart(request)

    def warm_up(self) -> None:
        """Do before the first request what it, or a later one, would wait for: compile kernels, capture graphs."""
        with torch.inference_mode():
            self.runner.warm_up()

    @property
    def working(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.inbox) or (not self.paused and bool(self.scheduler.requests))

    # The step

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Give some requests some tokens. Prefill and decode are the same thing here: a request whose computed tokens
        have not caught up with its tokens."""
        self.read_inbox()
        if self.governor is not None:
            self.governor.tick(self)
        self._drop_stopped()
        outputs = self.runner.queued_outputs()
        if outputs is None and not self.paused:
            work = self.scheduler.schedule(self.clock())
            self._draft(work)
            forward = self.runner.run(work)
            outputs = self._finish(forward)
        return outputs or []

    def _draft(self, work: list[Chunk] | ForwardPass) -> None:
        """Put draft tokens behind the chunks that decode, as far as pages and limits allow."""
        decoding = [chunk for chunk in work if chunk.request.decoding] if isinstance(work, list) else []
        if self.drafter is None or not decoding:
            return
        limit = max(1, 64 // len(decoding))
        drafts = self.drafter.draft([chunk.request for chunk in decoding], limit)
        for chunk, draft in zip(decoding, drafts, strict=True):
            request = chunk.request
            most = self.page_pool.tokens_until_pruning(request, chunk.tokens + limit) - chunk.tokens
            draft = draft.cut(min(most, request.limit - len(request.tokens) - 1))
            if len(draft) and self.page_pool.grow(request, request.computed + chunk.tokens + len(draft)):
                chunk.draft = draft
                self.counts.drafted_tokens += len(draft)

    def _finish(self, forward: Forward | None) -> list[Output]:
        """What a forward, if one has finished, gives its requests."""
        if forward is None:
            return []
        self.record_prompt(forward.chunks, forward.spans, forward.hidden_TD)
        outputs = self._accept(forward)
        self.experts.count(forward.routing)
        forward.note_routes()
        if self.drafter is not None:
            self.drafter.observe(forward, forward.hidden_TD)
        for chunk in forward.chunks:
            if chunk.request.finish_reason is not None:
                self.retire(chunk.request)
        return outputs

    def _accept(self, forward: Forward) -> list[Output]:
        """Sample the next token of every request whose tokens are all computed, and verify its draft tokens."""
        self.counts.steps += 1
        ready: list[tuple[Chunk, int]] = []
        rows: list[int] = []
        for chunk, span in zip(forward.chunks, forward.spans):
            request = chunk.request
            if chunk.last:
                ready.append((chunk, len(rows)))
                rows.extend(range(span.start + chunk.tokens - 1, span.stop))
            self.counts.prompt_tokens += max(0, min(chunk.tokens, len(request.prompt) - request.computed))
            request.end_forward(computed=chunk.tokens)
        outputs = []
        if rows:
            sampler = forward.sampler(rows) if self.search is None else self.search.sampler(forward.hidden_TD[rows])
            outputs = [self._verify(chunk, sampler, first) for chunk, first in ready]
        for chunk in forward.chunks:
            self.page_pool.after_forward(chunk.request)
        return outputs

    def _verify(self, chunk: Chunk, sampler: TokenSampler, first: int) -> Output:
        """What one request gains: the token sampled after its last one, and after each draft token that was sampled."""
        request, draft = chunk.request, chunk.draft
        output = Output(request, [], "", [])
        if request.embed and request.finish_reason is None:
            request.finish_reason = "stop"
        node: int | None = -1
        while node is not None and request.finish_reason is None:
            chosen = sampler.sample(first + 1 + node, request, self.stop_tokens)
            output.tokens.append(chosen.token)
            output.logprobs.append(chosen)
            output.text += request.append(chosen.token, self.stop_tokens)
            node = draft.child(node, chosen.token) if draft is not None else None
            if node is not None and request.finish_reason is None:
                chunk.accepted.append(node)
        self._keep_accepted(chunk)
        return self.record_output(output, self.version)

    def record_output(self, output: Output, version: int) -> Output:
        """Record what a request gained, from weights of which version."""
        request, now = output.request, self.clock()
        request.first_token = now if request.first_token is None else request.first_token
        request.last_token = now
        request.logprobs.extend(output.logprobs)
        request.versions.extend([version] * len(output.tokens))
        self.counts.generated_tokens += len(output.tokens)
        output.finish_reason = request.finish_reason
        return output

    def _keep_accepted(self, chunk: Chunk) -> None:
        """Accepted draft tokens are computed already; move their rows into line where they were a tree."""
        request, size, start = chunk.request, self.page_pool.size, chunk.request.computed

        def row(place: int) -> int:
            return request.pages[place // size] * size + place % size

        moved = [(start + node, start + place) for place, node in enumerate(chunk.accepted) if node != place]
        if moved:
            sources, targets = ([row(each) for each in side] for side in zip(*moved))
            self.page_pool.move(request, sources, targets)
        request.computed += len(chunk.accepted)
        self.counts.accepted_tokens += len(chunk.accepted)

    def record_prompt(self, chunks: Sequence[Chunk], spans: Sequence[Span], hidden_TD: Tensor) -> None:
        """For the requests that ask for it: the log-probability of every prompt token, or the sum of hidden states."""
        for chunk, span in zip(chunks, spans):
            request = chunk.request
            hidden = hidden_TD[span.start : span.start + chunk.tokens]
            if request.embed:
                request.hidden_D = add_rows(request.pooling, request.hidden_D, hidden)
            if request.scores_prompt:
                record_logprobs(self.model, request, hidden)

    def read_inbox(self) -> None:
        while self.inbox:
            self.inbox.popleft()()

    def needs(self, forward: ForwardPass) -> bool:
        """Whether a request still waits for a forward, and its weights are not too old."""
        return forward.version >= self.oldest and any(chunk.request.finish_reason is None for chunk in forward.chunks)

    def _drop_stopped(self) -> None:
        """Give up the stopped forwards that nobody waits for any more."""
        for forward in [forward for forward in self.scheduler.stopped if not self.needs(forward)]:
            self.scheduler.stopped.remove(forward)
            for chunk in forward.chunks:
                chunk.request.end_forward()
                if chunk.request.finish_reason is not None:
                    self.retire(chunk.request)
                else:
                    self.restart(chunk.request)

    def restart(self, request: Request) -> None:
        """Compute all its tokens again, with the weights of now."""
        self.page_pool.release(request)
        request.clear_records()
        request.root = request.shares_with(self.version)

    def retire(self, request: Request) -> None:
        """A finished request gives its pages back; one that is in a forward, when that has ended."""
        if request.in_forward or request.number not in self.scheduler.requests:
            return
        lease = None
        if request.lease is not None and request.finish_reason == "handed":
            lease = (request.lease[0], self.clock() + request.lease[1])
        self.scheduler.remove(request, lease)
        self.counts.finished += 1
        self.counts.aborted += request.finish_reason == "abort"
        if self.drafter is not None:
            self.drafter.finished(request)
