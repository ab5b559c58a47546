"""A request, checked against what the engine can do; its state in the engine; and its outputs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.serve.core.bad_words import token_sequences
from moesaic.serve.core.blanks import Blanks, check_blanks, with_blanks
from moesaic.serve.core.context_windows import Windows, max_tokens_over
from moesaic.serve.core.dry import Breakers, breakers_of
from moesaic.serve.core.pooling import Pooling, normalized, pooled
from moesaic.serve.core.sampling import Sampling
from moesaic.serve.core.text import TextStream

if TYPE_CHECKING:
    from moesaic.serve.core.adapters import Adapter
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.kv.compact import CompactRequest
    from moesaic.serve.core.page_pool import Node
    from moesaic.serve.pages.incoming import Incoming
    from moesaic.serve.pages.remote import Origin

NUMBERS = itertools.count()


class TooLong(UserError):
    """A prompt longer than the engine's max length."""


class TokenLogprob(NamedTuple):
    """One token's log-probability under the model, and the likeliest tokens in its place, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    drawn: float | None = None  # under temperature and truncation, with `record_draws`
    kept: tuple[int, ...] | None = None  # the tokens truncation kept; None: all
    rank: int | None = None  # 1 for the likeliest; known where likeliest tokens are reported


@dataclass
class Output:
    """What one step generated for one request."""

    request: Request
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None  # stop, length, abort, handed


@dataclass(frozen=True)
class Completion:
    """The result of a finished request."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None
    versions: list[int]  # the weights' version each token was sampled from
    routes: dict[int, Tensor] | None  # layer -> (tokens computed, K), with `record_routes`
    embedding: Tensor | None


@dataclass(eq=False)
class Request:
    """One sequence: the tokens it has, of which `computed` are in the KV cache. Prefill and decode are the same thing:
    tokens that are not computed yet.

    A request waits (no pages), runs (it holds pages), and is finished (`finish_reason`). While running it is in a
    forward from `begin_forward` to `end_forward`: nobody else may schedule it, preempt it or free its pages then.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0  # lower is more urgent
    deadline: float | None = None  # when the first token is due, by the engine's clock
    salt: str = ""  # requests of different salts share no cached pages
    adapter: Adapter | None = None
    is_step: bool = False  # of something larger, such as a beam: nobody waits for it alone
    embed: bool = False  # only the hidden states of the prompt are computed
    pooling: Pooling = "mean"  # of them, for an embedding
    classify: bool = False  # an encoder's labels are wanted instead: `hidden_D` is their logits
    token_types: Sequence[int] | None = None  # of an encoder that reads pairs: which text each token is of
    windows: Windows | None = None  # parts of the prompt that do not see each other
    # After its first token it is handed on ("handed"), and its pages are held under this name for so many seconds.
    lease: tuple[str, float] | None = None
    origin: Origin | None = None  # the engine that has computed its pages
    seed: int = 0  # chosen by the engine where the sampling params have none
    arrived: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=lambda: next(NUMBERS))

    tokens: list[int] = field(init=False)
    computed: int = 0
    expected_cached: int = 0  # tokens that were cached when it was added
    cached: int = 0  # tokens that were cached when it was first scheduled
    transferred: int = 0  # tokens whose pages came from another engine
    recomputed: int = 0  # tokens whose pages should have, and did not
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # the shared pages among them, from the first on
    state: int | None = None  # the place of what layers keep of it as a whole, while it holds pages
    data_rank: int = 0  # whose pages they are, in a group of ranks with requests of their own
    incoming: Incoming | None = None  # pages that come from outside of the KV cache
    compact: CompactRequest | None = None  # how its pages are used, where a KV policy prunes them
    root: Hashable = None  # with whom it shares pages; None: with nobody
    text: TextStream | None = None
    limit: int = 0  # max tokens, its prompt included
    logprobs: list[TokenLogprob] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    routes: dict[int, list[Tensor]] = field(default_factory=dict)
    hidden_D: Tensor | None = None  # what pooling keeps of the prompt so far, for an embedding
    matcher: Any = None  # the state of its grammar
    breakers: Breakers | None = None  # of DRY, as tokens
    mu: float | None = None  # the state of mirostat
    _in_forward: bool = field(default=False, init=False, repr=False)
    preemptions: int = 0
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or the stop token of its sampling params that ended it

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def append(self, token: int, stop_tokens: set[int]) -> str:
        """One more token; the text that is certain now. Sets `finish_reason` if it was the last."""
        sampling, stream = self.sampling, self.text
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.accept(token)
        ends = token in stop_tokens and not sampling.ignore_eos
        if ends or token in sampling.stop_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if ends else token
            return stream.finish() if stream is not None else ""
        text = stream.push(token) if stream is not None else ""
        complete = self.matcher is not None and self.matcher.finished
        if stream is not None and stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stream.stopped
        elif complete:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        elif self.lease is not None:  # it goes on elsewhere, and so does its text
            self.finish_reason = "handed"
            return text
        if self.finish_reason is not None and stream is not None:
            text += stream.finish()
        return text

    @property
    def in_forward(self) -> bool:
        """Whether a forward that has not ended computes some of its tokens."""
        return self._in_forward

    def begin_forward(self) -> None:
        assert not self._in_forward, "a request is in one forward at a time"
        self._in_forward = True

    def end_forward(self, computed: int = 0) -> None:
        """Its forward has ended, or was given up, and has computed so many more of its tokens."""
        self.computed += computed
        self._in_forward = False

    def clear_records(self) -> None:
        """Its pages are gone: what is recorded of every row will be recorded again, but for what may have been sent."""
        self.routes, self.hidden_D = {}, None
        if not self.prompt_recorded:
            self.prompt_logprobs = []

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def written(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.written > 0

    @property
    def prompt_recorded(self) -> bool:
        """Whether the log-probabilities of all its prompt are there: whoever receives the first token reads them."""
        return len(self.prompt_logprobs) == len(self.prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether its next tokens are some of whose log-probabilities will be recorded."""
        return self.sampling.prompt_logprobs is not None and not self.prompt_recorded

    @property
    def recomputes_prompt(self) -> bool:
        """Whether the prompt must be computed even where it is cached."""
        sampling = self.sampling
        return self.embed or sampling.prompt_logprobs is not None or sampling.record_routes or self.windows is not None

    def shares_with(self, version: int) -> Hashable:
        """Whose pages are its own: nobody's where parallel windows make them what one sequence would not give."""
        return None if self.windows is not None else (self.salt, self.adapter, version)

    @property
    def urgency(self) -> tuple[float, ...]:
        """Smaller goes first."""
        return (self.priority, self.deadline if self.deadline is not None else float("inf"), self.arrived, self.number)


def new_request(
    engine: Engine,
    prompt: str | Sequence[int],
    sampling: Sampling,
    adapter: str | None,
    sibling: int,
    **options: Any,
) -> Request:
    """A request that the engine can serve. `sibling` numbers the completions of one prompt: from one seed, they
    differ."""
    tokenizer, vocab, max_length = engine.tokenizer, engine.model.config.vocab, engine.max_length
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("prompt", "the model has no tokenizer", "Give token numbers.")
        prompt = tokenizer.encode(prompt)
    if not prompt:
        raise UserError("prompt", "is empty")
    if not engine.generates and not options.get("embed"):
        problem = f"is an encoder ({engine.model.config.family}): it reads texts and writes none"
        raise UserError("model", problem, "Ask /v1/embeddings, /v1/rerank or /v1/score.")
    infilling = engine.model.config.infilling
    if infilling is not None and not options.get("embed") and sampling.prompt_logprobs is None:
        runner = getattr(engine, "runner", None)
        layer_by_layer = getattr(runner, "takes_windows", False)
        check_blanks(engine.model.config, takes_windows=layer_by_layer, prunes=engine.page_pool.store is not None)
        prompt, options["windows"] = with_blanks(prompt, infilling)
    check_tokens("prompt", prompt, vocab)
    check_tokens("logit_bias", list(sampling.logit_bias), vocab)
    check_tokens("stop_tokens", list(sampling.stop_tokens), vocab)
    check_tokens("allowed_token_ids", list(sampling.allowed_tokens or ()), vocab)
    check_tokens("logprob_token_ids", sampling.logprob_tokens, vocab)
    if sampling.bad_words:
        sampling = replace(sampling, bad_words=token_sequences(tokenizer, sampling.bad_words, vocab))
    if (windows := options.get("windows")) is not None and not isinstance(windows, Blanks):
        max_length = max_tokens_over(engine, prompt, windows)
        if sampling.prompt_logprobs is not None:
            raise UserError("prompt_logprobs", "are not given with parallel_contexts", "Ask for them alone.")
    if len(prompt) + (not options.get("embed")) > max_length:
        problem = f"has {len(prompt)} tokens, and the model holds {max_length} with its answer"
        raise TooLong("prompt", problem, "Shorten it.")
    if adapter is not None and adapter not in engine.adapters:
        raise UserError("adapter", f"there is no {adapter!r}", f"Loaded: {', '.join(engine.adapters) or 'none'}.")
    request = Request(prompt, sampling, adapter=engine.adapters[adapter] if adapter else None, **options)
    if engine.page_pool.store is not None:
        engine.page_pool.store.check(request)
    request.seed = sampling.seed if sampling.seed is not None else engine.random.getrandbits(63)
    request.seed ^= sibling << 32
    request.limit = min(max_length, len(prompt) + (sampling.max_tokens or max_length))
    if tokenizer is not None:
        request.text = TextStream(tokenizer, prompt, sampling.stop, sampling.min_tokens, sampling.markers)
    elif sampling.stop or sampling.grammar:
        raise UserError("stop", "the model has no tokenizer", "Use stop_tokens.")
    if sampling.dry_multiplier and tokenizer is not None and request.breakers is None:
        request.breakers = breakers_of(tokenizer, sampling.dry_sequence_breakers)
    if sampling.grammar is not None:
        request.matcher = sampling.grammar.matcher(tokenizer, vocab, engine.stop_tokens)
    return request


def check_tokens(name: str, tokens: Sequence[int], vocab: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
        wrong = next(token for token in tokens if not 0 <= token < vocab)
        raise UserError(name, f"holds token {wrong}, which is outside the vocabulary of {vocab}")


def completion(request: Request, text: str) -> Completion:
    """The completion of a finished request."""
    hidden_D = request.hidden_D
    return Completion(
        text=text,
        tokens=request.tokens[len(request.prompt) :],
        logprobs=request.logprobs,
        finish_reason=request.finish_reason or "abort",
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached,
        prompt_logprobs=request.prompt_logprobs or None,
        versions=request.versions,
        routes={layer: torch.cat(rows) for layer, rows in request.routes.items()} or None,
        embedding=normalized(pooled(request.pooling, hidden_D, len(request.prompt))) if hidden_D is not None else None,
    )
