"""The `usage` of a response."""

from __future__ import annotations

from pydantic import BaseModel


class PromptDetails(BaseModel):
    cached_tokens: int = 0
    # Where prefill and decode are apart: prompt tokens that the decode worker got, and those it computed again.
    transferred_tokens: int = 0
    recomputed_tokens: int = 0


class CompletionDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
