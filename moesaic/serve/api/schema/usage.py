"""What the responses of both kinds of completion hold beside their choices: who answered, and the `usage`."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, Field

from moesaic.serve.api.timings import Timings

Choice = TypeVar("Choice", bound=BaseModel)


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


class Completed(BaseModel, Generic[Choice]):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str | None = None
    timings: Timings | None = Field(default=None, exclude_if=lambda value: value is None)
