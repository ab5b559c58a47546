"""Completions of examples by an engine: each with a seed of its own, so that it is the same whatever runs beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.model.tokenizer import Tokenizer
from moesaic.model.untrusted_content import encode_untrusted
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.worlds.example import Example

SPEAKERS = ("assistant",)  # roles whose turns may hold special tokens: the model's own


def seed_of(*parts: int) -> int:
    """A seed for each completion of each prompt of each round of each run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_tokens(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> list[int]:
    """The tokens up to where the assistant is about to speak. What others said to it is data: a mark of a chat template
    in a question, or in what a tool found, is the characters it is written with."""
    options = {"tools": list(tools)} if tools else {}
    return encode_untrusted(tokenizer, messages, trusted=SPEAKERS, **options)


def requests_for(engine: Engine, example: Example, group: int, sampling: Mapping[str, Any], seed: int) -> list[Request]:
    """`group` requests for completions of one prompt, not yet submitted; `sampling` is options of `Sampling`."""
    assert engine.tokenizer is not None
    with example.at_its_place():
        prompt = prompt_tokens(engine.tokenizer, example.messages, example.facts.get("tools"))
        return [engine.request(prompt, Sampling(**sampling, seed=seed_of(seed, number))) for number in range(group)]
