"""What a model says, word by word, as a test tells it to: tool calls and thoughts that no tiny model would write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampler import Sampler
from tests.serve.api.running import Running


@contextmanager
def saying(server: Running, text: str) -> Iterator[None]:
    """Every completion is this text, and then ends."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    tokens = [*tokenizer.encode(text, special=False), min(tokenizer.stop_tokens)]

    def sample(self: Sampler, row: int, request: Request, stop_tokens: Any) -> TokenLogprob:
        return TokenLogprob(tokens[min(request.written, len(tokens) - 1)], 0.0)

    with patch.object(Sampler, "sample", sample):
        yield
