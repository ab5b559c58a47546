"""What answers cost, as OpenAI counts it: a prompt once, however many answers it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.serve.api.schema.usage import CompletionDetails, PromptDetails, Usage
from moesaic.serve.api.tokens_as_text import TokenTexts, finite
from moesaic.serve.core.request import Request, TokenLogprob


def usage(requests: Sequence[Request], prompts: int = 1, thought: int = 0, dropped: int = 0) -> Usage:
    """`requests` are those of the first prompt, then those of the second, and so on. `dropped` tokens of each were
    generated and not given out."""
    first = requests[:: max(1, len(requests) // prompts)]
    read = sum(len(request.prompt) for request in first)
    written = sum(max(0, request.written - dropped) for request in requests)
    return Usage(
        prompt_tokens=read,
        completion_tokens=written,
        total_tokens=read + written,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(request.cached for request in first)),
        completion_tokens_details=CompletionDetails(reasoning_tokens=thought),
    )


def prompt_logprobs(request: Request, texts: TokenTexts) -> list[dict[str, Any] | None] | None:
    """Each token of the prompt and the likeliest in its place, as vLLM writes them; the first token has none."""
    if request.sampling.prompt_logprobs is None:
        return None

    def entry(info: TokenLogprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(info.top, 1)}
        found = dict(info.top) | {info.token: info.logprob}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks.get(token),
                "decoded_token": texts.text(token),
            }
            for token, logprob in found.items()
        }

    return [None if info is None else entry(info) for info in request.prompt_logprobs]
