"""The one engine: every generated token, for the API, the chat, evaluation and rollouts, comes from `Engine.step`.

    engine = moesaic.Engine(moesaic.load("out/smollm2"))
    engine.generate(["The capital of France is"], max_tokens=8, temperature=0.0)[0].text

An engine belongs to one thread. Others may call `submit` and `call`, which only leave a note in its inbox; it is read
between steps, and between the layers of a long one.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.layout import Span
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter, load_adapter
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.expert_counts import ExpertCounts
from moesaic.serve.core.forward_pass import Choosing, Chunk, Forward, ForwardPass
from moesaic.serve.core.kv.store import store_for
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.memory import dtype_of_cache, pages_that_fit
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.policies import Policy
from moesaic.serve.core.policies.chunked import Chunked
from moesaic.serve.core.request import Completion, Output, Request, Sampling, TooLong, completion
from moesaic.serve.core.sampler import Choices
from moesaic.serve.core.scheduler import Scheduler
from moesaic.serve.core.text import TextStream

if TYPE_CHECKING:
    from moesaic.serve.gpu.overlap import QueuedSteps


GPU_TOKENS = 8192  # in one step of a GPU, which is no faster with fewer
PAUSED = 0.002  # seconds between two looks whether to go on


@dataclass
class Counts:
    """What the engine has done since it began."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    aborted: int = 0  # of those that finished
    busy_seconds: float = 0.0


class Engine:
    """`cache_bytes` is a hard limit: what does not fit waits, or is computed again. `cache_dtype` (float32, bfloat16,
    float8) is what keys and values are rounded to; else they stay as they are."""

    def __init__(
        self,
        model: Model,
        *,
        cache_bytes: int | None = None,
        page_size: int = 16,
        max_requests: int = 64,
        policy: Policy | None = None,
        drafter: Drafter | None = None,
        kv_policy: KVPolicy | None = None,
        cache_dtype: str | None = None,
        reuse_prefixes: bool = True,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.stop_tokens: set[int] = set(model.tokenizer.stop_tokens) if model.tokenizer else set()
        kept = dtype_of_cache(model, cache_dtype)
        pages = pages_that_fit(model, cache_bytes, page_size, max_requests, kept)
        self.cache = model.new_cache(pages, page_size, kept)
        self.page_pool = PagePool(self.cache, reuse_prefixes, store_for(model, self.cache, kv_policy, drafter))
        policy = policy or (Chunked(tokens=GPU_TOKENS) if model.device.type == "cuda" else Chunked())
        self.scheduler = Scheduler(self.page_pool, policy, max_requests)
        # Behind a router, which sees to it that guesses are made only where they pay.
        self.drafter = (
            DraftRouter.over(drafter) if drafter is not None and not isinstance(drafter, DraftRouter) else drafter
        )
        self.clock = clock
        self.random = random.Random(seed)
        self.adapters: dict[str, Adapter] = {}
        self.inbox: deque[Callable[[], Any]] = deque()
        self.version = 0  # of the weights
        self.oldest = 0  # passes begun with weights older than this are not worth finishing
        self.paused = False
        self.counts = Counts()
        self.experts = ExpertCounts(model)
        self.queued = queued_steps(self)
        if self.drafter is not None:
            self.drafter.start(self)

    # What others ask of it

    def generate(
        self, prompts: Sequence[str | Sequence[int]], n: int = 1, *, adapter: str | None = None, **sampling: Any
    ) -> list[Completion]:
        """Answers to all prompts, in their order; with `n`, so many of each, one after the other."""
        wishes = Sampling(**sampling)
        requests = [self.request(prompt, wishes, adapter=adapter, sibling=i) for prompt in prompts for i in range(n)]
        texts: dict[int, list[str]] = {request.number: [] for request in requests}
        for request in requests:
            self.add(request)
        try:
            while any(request.finish_reason is None for request in requests):
                outputs = self.step()
                for output in outputs:
                    if output.request.number in texts:
                        texts[output.request.number].append(output.text)
                if not outputs and not self.working:  # paused: another thread will say when to go on
                    time.sleep(PAUSED)
        finally:  # also on Ctrl-C
            for request in requests:
                self.abort(request)
        return [completion(request, "".join(texts[request.number])) for request in requests]

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
        sampling = sampling or Sampling()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("prompt", "the model has no tokenizer", "Give token numbers.")
            prompt = self.tokenizer.encode(prompt)
        vocab, room = self.model.config.vocab, self.room
        if not prompt:
            raise UserError("prompt", "is empty")
        if any(not 0 <= token < vocab for token in prompt):
            raise UserError("prompt", f"holds a token outside the vocabulary of {vocab}")
        for name in ("logit_bias", "stop_tokens"):
            if any(not 0 <= token < vocab for token in getattr(sampling, name)):
                raise UserError(name, f"holds a token outside the vocabulary of {vocab}")
        if len(prompt) + (not options.get("embed")) > room:
            problem = f"has {len(prompt)} tokens, and the model holds {room} with its answer"
            raise TooLong("prompt", problem, "Shorten it.")
        if adapter is not None and adapter not in self.adapters:
            raise UserError("adapter", f"there is no {adapter!r}", f"Loaded: {', '.join(self.adapters) or 'none'}.")
        request = Request(prompt, sampling, adapter=self.adapters[adapter] if adapter else None, **options)
        if self.page_pool.store is not None:
            self.page_pool.store.check(request)
        request.seed = sampling.seed if sampling.seed is not None else self.random.getrandbits(63)
        request.seed ^= sibling << 32  # answers to one prompt, from one seed, that differ
        request.limit = min(room, len(prompt) + (sampling.max_tokens or room))
        if self.tokenizer is not None:
            request.text = TextStream(self.tokenizer, prompt, sampling.stop, sampling.min_tokens)
        elif sampling.stop or sampling.grammar:
            raise UserError("stop", "the model has no tokenizer", "Use stop_tokens.")
        if sampling.grammar is not None:
            request.matcher = sampling.grammar.matcher(self.tokenizer, self.model.config.vocab, self.stop_tokens)
        return request

    @property
    def room(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return min(self.model.config.context, self.cache.pages * self.page_pool.size)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Make a LoRA adapter known by a name; requests under way with an older one of that name keep it."""
        self.adapters[name] = load_adapter(self.model, path, name)

    def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UserError("adapter", f"there is no {name!r}")

    def submit(self, request: Request) -> None:
        """From any thread."""
        self.inbox.append(lambda: self.add(request))

    def call(self, note: Callable[[], Any]) -> None:
        """From any thread: have something done between two steps (abort a request, change weights)."""
        self.inbox.append(note)

    def add(self, request: Request) -> None:
        request.root = (request.salt, request.adapter, self.version)
        request.expected = self.page_pool.found(request)
        self.scheduler.requests[request.number] = request

    def abort(self, request: Request) -> None:
        """Whatever it has written so far stands."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
        self.retire(request)

    def pause(self) -> None:
        """Finish no further step until `resume`; requests keep their place."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def weights_changed(self, recompute: bool = True) -> None:
        """The model's weights are new: nothing cached may be shared with what comes. Requests under way compute their
        tokens again with the new weights, or go on with keys and values of the old ones."""
        self.version += 1
        self.oldest = self.version if recompute else self.oldest
        self.page_pool.flush()
        for request in self.scheduler.requests.values():
            request.root = None
            if recompute and not request.busy:
                self.restart(request)

    @property
    def working(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.inbox) or (not self.paused and bool(self.scheduler.requests))

    # The step

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Give some requests some tokens. A prompt being read and an answer being written are the same thing here: a
        request whose computed tokens have not caught up with its known tokens."""
        self._read_inbox()
        self._drop_unwanted()
        if self.queued is not None and (outputs := self.queued.step()) is not None:
            return outputs
        if self.paused:
            return []
        work = self.scheduler.schedule(self.clock())
        if isinstance(work, list):
            if not work:
                return []
            self._draft(work)
            if self.queued is not None and self.queued.takes(work):
                return self._finish(self.queued.forward(work))
            work = ForwardPass(self.model, work, self.cache, self.version)
        if not self._run(work):
            self.scheduler.stopped.append(work)
            return []
        return self._finish(work)

    def _finish(self, work: Forward) -> list[Output]:
        """What came of a forward."""
        self.record_prompt(work.chunks, work.spans, work.hidden_TD)
        outputs = self._accept(work)
        self.experts.count(work.routing)
        work.note_routes()
        if self.drafter is not None:
            self.drafter.observe(work, work.hidden_TD)
        for chunk in work.chunks:
            if chunk.request.finish_reason is not None:
                self.retire(chunk.request)
        return outputs

    def _run(self, work: ForwardPass) -> bool:
        """Layer by layer; False if something more urgent came between."""
        policy, began, due = self.scheduler.policy, self.clock(), float("-inf")
        while not work.done:
            work.advance()
            now = self.clock()
            if (self.inbox or now >= due) and not work.done:
                self._read_inbox()
                ready = self.scheduler.ready()
                if self.paused or not self._wanted(work) or policy.interrupts(work, ready, now):
                    break
                due = policy.next_event(work, ready, now)
        work.seconds += self.clock() - began
        self.counts.busy_seconds += self.clock() - began
        if work.done:
            policy.finished(work)
        return work.done

    def _accept(self, work: Forward) -> list[Output]:
        """Choose the next token of every request that is ready for it, and follow its guesses as far as they hold."""
        self.counts.steps += 1
        ready: list[tuple[Chunk, int]] = []
        rows: list[int] = []
        for chunk, span in zip(work.chunks, work.spans):
            request = chunk.request
            if chunk.last:
                ready.append((chunk, len(rows)))
                rows.extend(range(span.start + chunk.tokens - 1, span.stop))
            self.counts.prompt_tokens += max(0, min(chunk.tokens, len(request.prompt) - request.computed))
            request.computed += chunk.tokens
            request.busy = False
        outputs = []
        if rows:
            choices = work.choices(rows)
            outputs = [self._follow(chunk, choices, first) for chunk, first in ready]
        for chunk in work.chunks:
            self.page_pool.settle(chunk.request)
        return outputs

    def _follow(self, chunk: Chunk, choices: Choosing, first: int) -> Output:
        """What one request gains: the model's choice after its last token, and after each guess that was so chosen."""
        request, draft = chunk.request, chunk.draft
        output = Output(request, [], "", [])
        if request.embed and request.finish_reason is None:
            request.finish_reason = "stop"
        node: int | None = -1
        while node is not None and request.finish_reason is None:
            chosen = choices.choose(first + 1 + node, request, self.stop_tokens)
            output.tokens.append(chosen.token)
            output.logprobs.append(chosen)
            output.text += request.append(chosen.token, self.stop_tokens)
            node = draft.child(node, chosen.token) if draft is not None else None
            if node is not None and request.finish_reason is None:
                chunk.accepted.append(node)
        self._keep_accepted(chunk)
        return self.record_output(output, self.version)

    def record_output(self, output: Output, version: int) -> Output:
        """Note what a request gained, by weights of which version."""
        request, now = output.request, self.clock()
        request.first_token = now if request.first_token is None else request.first_token
        request.last_token = now
        request.answer.extend(output.logprobs)
        request.versions.extend([version] * len(output.tokens))
        self.counts.generated_tokens += len(output.tokens)
        output.finish_reason = request.finish_reason
        return output

    def _keep_accepted(self, chunk: Chunk) -> None:
        """The guesses that held are computed already; bring their rows in line where they were a tree."""
        request, size, start = chunk.request, self.page_pool.size, chunk.request.computed

        def row(place: int) -> int:
            return request.pages[place // size] * size + place % size

        moved = [(start + node, start + place) for place, node in enumerate(chunk.accepted) if node != place]
        if moved:
            self.cache.move([row(source) for source, _ in moved], [row(target) for _, target in moved])
        request.computed += len(chunk.accepted)
        self.counts.accepted_tokens += len(chunk.accepted)

    def _draft(self, chunks: list[Chunk]) -> None:
        """Put guesses behind the requests that wait for their next token, as far as pages and limits allow."""
        asking = [chunk for chunk in chunks if chunk.request.decoding]
        if self.drafter is None or not asking:
            return
        most = max(1, 64 // len(asking))
        for chunk, draft in zip(asking, self.drafter.draft([chunk.request for chunk in asking], most), strict=True):
            request = chunk.request
            draft = draft.cut(min(most, request.limit - len(request.tokens) - 1))
            if len(draft) and self.page_pool.grow(request, request.computed + chunk.tokens + len(draft)):
                chunk.draft = draft
                self.counts.drafted_tokens += len(draft)

    def record_prompt(self, chunks: Sequence[Chunk], spans: Sequence[Span], hidden_TD: Tensor) -> None:
        """What some requests want of every token of their prompt: its log-probability, or the mean hidden state."""
        for chunk, span in zip(chunks, spans):
            request = chunk.request
            hidden = hidden_TD[span.start : span.start + chunk.tokens]
            if request.embed:
                total_D = hidden.float().sum(0)
                request.hidden_D = total_D if request.hidden_D is None else request.hidden_D + total_D
            if request.sampling.prompt_logprobs is not None and not request.prompt_noted:
                request.prompt_logprobs = request.prompt_logprobs or [None]
                after = request.prompt[request.computed + 1 : request.computed + chunk.tokens + 1]
                choices = Choices(self.model.logits_at(hidden[: len(after)]))
                for row, token in enumerate(after):
                    request.prompt_logprobs.append(choices.report(row, token, request.sampling.prompt_logprobs))

    def _read_inbox(self) -> None:
        while self.inbox:
            self.inbox.popleft()()

    def _wanted(self, work: ForwardPass) -> bool:
        """Whether somebody still waits for what a pass computes, with the weights it began with."""
        return work.version >= self.oldest and any(chunk.request.finish_reason is None for chunk in work.chunks)

    def _drop_unwanted(self) -> None:
        """Give up the stopped passes nobody waits for any more."""
        for work in [work for work in self.scheduler.stopped if not self._wanted(work)]:
            self.scheduler.stopped.remove(work)
            for chunk in work.chunks:
                chunk.request.busy = False
                if chunk.request.finish_reason is not None:
                    self.retire(chunk.request)
                else:
                    self.restart(chunk.request)

    def restart(self, request: Request) -> None:
        """Compute all its tokens again, with the weights of now."""
        self.page_pool.release(request)
        request.start_over()
        request.root = (request.salt, request.adapter, self.version)

    def retire(self, request: Request) -> None:
        """A request that will not go on gives its pages back; one inside a pass, when that has finished."""
        if request.busy or request.number not in self.scheduler.requests:
            return
        self.scheduler.remove(request)
        self.counts.finished += 1
        self.counts.aborted += request.finish_reason == "abort"
        if self.drafter is not None:
            self.drafter.finished(request)


def queued_steps(engine: Engine) -> QueuedSteps | None:
    """On a GPU, if the model is of the kind: steps as graphs. Elsewhere not even the code is there."""
    if engine.model.device.type != "cuda":
        return None
    from moesaic.serve.gpu.overlap import QueuedSteps

    return QueuedSteps(engine) if QueuedSteps.fits(engine) else None
