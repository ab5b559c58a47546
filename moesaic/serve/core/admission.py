"""Make a request from what a user asks, checked against what the engine can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moesaic.errors import UserError
from moesaic.serve.core.request import Request, Sampling, TooLong
from moesaic.serve.core.text import TextStream

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


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
    check_tokens("prompt", prompt, vocab)
    check_tokens("logit_bias", list(sampling.logit_bias), vocab)
    check_tokens("stop_tokens", list(sampling.stop_tokens), vocab)
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
        request.text = TextStream(tokenizer, prompt, sampling.stop, sampling.min_tokens)
    elif sampling.stop or sampling.grammar:
        raise UserError("stop", "the model has no tokenizer", "Use stop_tokens.")
    if sampling.grammar is not None:
        request.matcher = sampling.grammar.matcher(tokenizer, vocab, engine.stop_tokens)
    return request


def check_tokens(name: str, tokens: Sequence[int], vocab: int) -> None:
    if any(not 0 <= token < vocab for token in tokens):
        raise UserError(name, f"holds a token outside the vocabulary of {vocab}")
