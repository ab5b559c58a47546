"""The sampling parameters of every request that generates text: OpenAI's fields, and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from moesaic.serve.api.schema.request_model import RequestModel as RequestModel
from moesaic.serve.api.schema.samplers import BeamParams, BranchParams, ContextParams, LogitBias, SamplerParams, Token
from moesaic.serve.api.schema.structured import ResponseFormat, StructuredFields
from moesaic.strict import wrong

MAX_LOGPROBS = 100  # of the likeliest tokens, beside the chosen one


def unsupported(instead: str) -> BeforeValidator:
    """For fields that would change the response if they were supported."""

    def check(value: Any) -> Any:
        if value is not None and value is not False:
            raise wrong(f"not supported; {instead}")
        return value

    return BeforeValidator(check)


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ExtraSamplingParams(StructuredFields, SamplerParams):
    """Fields that OpenAI's API does not have, wherever text is generated."""

    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="0 or -1: all.")
    stop_token_ids: Annotated[list[Token], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Lower is more urgent.")
    deadline_ms: float | None = Field(default=None, gt=0, le=1e12, description="Until the first token is due.")
    cache_salt: str | None = Field(
        default=None, description="Share the prefix cache only with requests of the same salt."
    )


class GenerationRequest(ExtraSamplingParams, BeamParams, BranchParams, ContextParams):
    model: str | None = Field(default=None, description="The model, or one of its adapters. Default: the model.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=32)] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS, description="-1: all.")
    response_format: ResponseFormat | None = None
    timings_per_token: bool | None = Field(default=None, description="Add `timings`, to every chunk too.")
    user: str | None = None
